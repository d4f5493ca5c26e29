"""The numbers of the gallery: runs the examples as they are, and keeps what they print with versions and device.

    python benchmarks/gallery.py [--examples sinc_decoupled deep_gp] [--output results] [--figures folder]

Examples that the file in `--output` already has are run again only where they are named.
"""

import argparse
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile

from common import HERE, report

EXAMPLES = HERE.parent / "examples"


def printed(name: str, figures: Path, *, smoke: bool) -> list[str]:
    """The lines that an example prints, without that on its figure."""
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "--output", str(figures / f"{name}.png")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run(command + ["--smoke"] * smoke, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{name} failed:\n{ran.stderr}")
    return [line for line in ran.stdout.splitlines() if line.strip() and not line.startswith("figure written")]


def main(arguments: argparse.Namespace) -> None:
    """Each example."""
    names = arguments.examples or sorted(path.stem for path in EXAMPLES.glob("*.py"))
    if arguments.reduced:
        names = ["quickstart"]
    path = None if arguments.output is None else arguments.output / "gallery.json"
    kept = json.loads(path.read_text("utf-8"))["printed"] if path is not None and path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) if arguments.figures is None else arguments.figures
        figures.mkdir(parents=True, exist_ok=True)
        for name in names:
            if name in kept and not arguments.examples:
                continue
            kept[name] = printed(name, figures, smoke=arguments.reduced)
            print(f"{name}\n", *(f"    {line}\n" for line in kept[name]), flush=True)
            report("gallery", {"printed": dict(sorted(kept.items()))}, arguments.output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true", help="one example, a few steps, to see that everything runs")
    parser.add_argument("--examples", nargs="*", help="names of examples; by default all that are not kept yet")
    parser.add_argument("--figures", type=Path, help="folder for the figures; by default they are thrown away")
    parser.add_argument("--output", type=Path, help="folder for the result as JSON")
    main(parser.parse_args())
