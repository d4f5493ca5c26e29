"""Scripts in processes of their own: what they set in JAX lasts longer than they do."""

from pathlib import Path
import subprocess
import sys

ROOT = Path(__file__).resolve().parent.parent


def run(script: Path, *arguments: str) -> str:
    """What a script prints."""
    command = [sys.executable, str(script), *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
