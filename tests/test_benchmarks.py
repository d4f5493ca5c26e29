"""Every benchmark runs in its reduced mode."""

import re

import pytest
from scripts import ROOT, run


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "common"),
    ids=lambda path: path.stem,
)
def test_benchmark_runs_in_its_reduced_mode_and_prints_versions_and_device(script, tmp_path):
    figure = tmp_path / "figure.png"
    draws = '"--figure"' in script.read_text("utf-8")
    output = run(script, "--reduced", "--output", str(tmp_path), *(["--figure", str(figure)] if draws else []))
    assert re.search(r'"jax": "[\d.]+".*"device": ', output)
    assert list(tmp_path.glob(f"{script.stem}*.json"))
    assert not draws or figure.stat().st_size > 10_000
