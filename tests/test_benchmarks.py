"""Every benchmark runs in its reduced mode."""

import re

import pytest
from scripts import ROOT, run

# Scripts with a file for each part of what they measure.
SEVERAL = {
    "automatic_fit": {"automatic_fit", "automatic_fit_nuts"},
    "finite_rank_tables": {"finite_rank_tables_linear_2", "finite_rank_tables_gaussian_2"},
    "gaussian_bound": {"gaussian_bound", "gaussian_bound_steps"},
    "inducing_grid": {"inducing_grid", "inducing_grid_nuts"},
    "joint_posteriors": {"joint_posteriors", "joint_steps"},
    "qsgp_all_rows": {"qsgp_all_rows", "qsgp_augmented"},
    "real_fields": {"real_flights", "real_towns"},
    "space_time": {"space_time", "space_time_nuts"},
    "spatial": {"spatial", "spatial_nuts"},
    "time_series": {"time_series", "time_series_inducing", "time_series_nuts"},
}


# A minute or more each, for what other tests do, too.
LONG = {"automatic_fit", "decoupled_paper"}
SCRIPTS = sorted(path for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "common")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, id=path.stem, marks=getattr(pytest.mark, "exhaustive" if path.stem in LONG else "thorough"))
        for path in SCRIPTS
    ],
)
def test_benchmark_runs_in_its_reduced_mode_and_prints_versions_and_device(script, tmp_path):
    figure = tmp_path / "figure.png"
    draws = '"--figure"' in script.read_text("utf-8")
    output = run(script, "--reduced", "--output", str(tmp_path), *(["--figure", str(figure)] if draws else []))
    assert re.search(r'"jax": "[\d.]+".*"device": ', output)
    written = {path.stem for path in tmp_path.glob("*.json")}
    assert written == SEVERAL.get(script.stem, {script.stem})
    assert not draws or figure.stat().st_size > 10_000
