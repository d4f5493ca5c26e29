"""Every example runs with `--smoke`, is listed, and has a page with its script and its figure."""

import re

import pytest
from scripts import ROOT, run

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FRONT_PAGE = (ROOT / "docs" / "gallery.md").read_text("utf-8")


@pytest.mark.parametrize(
    "name", sorted({script.stem for script in EXAMPLES} | set(re.findall(r"\(gallery/(\w+)\.md\)", FRONT_PAGE)))
)
def test_an_example_is_in_both_lists_and_has_a_page_with_its_script_and_a_figure(name):
    assert (ROOT / "examples" / f"{name}.py").exists()
    page = ROOT / "docs" / "gallery" / f"{name}.md"
    text = page.read_text("utf-8")
    assert f"```{{literalinclude}} ../../examples/{name}.py\n:language: python\n```" in text
    figures = re.findall(r"!\[[^\]]+\]\((\.\./_static/[\w/]+\.png)\)", text)
    assert figures
    assert all((page.parent / figure).stat().st_size > 10_000 for figure in figures)
    assert f"(gallery/{name}.md)" in FRONT_PAGE
    assert f"`{name}.py`" in (ROOT / "examples" / "README.md").read_text("utf-8")


@pytest.mark.exhaustive  # the README's first command, which `.ci/run` calls, runs the quickstart
@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_writes_its_figure(script, tmp_path):
    output = run(script, "--smoke", "--output", str(tmp_path / "figure.png"))
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    assert "figure written" in output
