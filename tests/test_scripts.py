"""Every example and benchmark runs: examples with `--smoke`, benchmarks with `--reduced`.

They run in the process of the tests, which has imported and compiled much of what they need; their children do not.
"""

from pathlib import Path
import re
import runpy
import sys

import jax
import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs a script with arguments and returns what it printed; its settings of JAX end with it."""

    def main(script: Path, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), *arguments])
        monkeypatch.setattr(sys, "path", [str(script.parent), *sys.path])
        runpy.run_path(str(script), run_name="__main__")
        return capsys.readouterr().out

    mpl.use("Agg")
    before = jax.config.read("jax_enable_x64")
    yield main
    plt.close("all")
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_example_runs_and_writes_its_figure(script, tmp_path, run):
    output = run(script, "--smoke", "--output", str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "figure written" in output


@pytest.mark.parametrize(
    "script",
    sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "common"),
    ids=lambda path: path.stem,
)
def test_benchmark_runs_in_its_reduced_mode_and_prints_versions_and_device(script, tmp_path, run):
    figure = tmp_path / "figure.png"
    draws = '"--figure"' in script.read_text("utf-8")
    output = run(script, "--reduced", "--output", str(tmp_path), *(["--figure", str(figure)] if draws else []))
    assert re.search(r'"jax": "[\d.]+".*"device": ', output)
    assert (tmp_path / f"{script.stem}.json").exists()
    assert not draws or figure.stat().st_size > 10_000
