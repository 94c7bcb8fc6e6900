"""Tables are filled from the JSON of the models, whatever is missing in it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from jacobiflow.cli.main import main
from jacobiflow_lab.paper.report import render_again
from jacobiflow_lab.paper.tables import Column, Number, Table, layout

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
REPORT = Path(__file__).parents[3] / "docs" / "report"
TABLE = Table(
    title="Times",
    rows="rows",
    columns=(
        Column("method", "{method}"),
        Column("row", "{#}"),
        Column("seconds", "{seconds:.2f} ± {spread:.2f}", better="lower"),
        Column("block *", "{sweeps/*:.1f}", over="sweeps", empty=""),
        Column("falls", "{falls}", empty="unknown"),
    ),
    footers=("total | | {total:.1f} | {/total:.0f} | | all",),
    note="A note.",
)


def test_a_table_has_a_row_per_entry_and_a_column_per_block() -> None:
    rows = [
        {"method": "a", "seconds": 1.234, "spread": 0.5, "sweeps": [3.0], "falls": True},
        {"method": "b", "seconds": None, "spread": 0.0, "sweeps": [3.0, 4.0], "falls": None},
        {"method": "c", "seconds": 2.0, "spread": 0.0, "sweeps": [], "falls": False},
        {"method": "d", "missing": "no weights"},
    ]
    docs = {"m": {"data": {"rows": rows, "total": 9.0}}, "n": {"missing": "no model"}}
    grid = layout(TABLE, docs)
    assert grid.texts() == [
        ["model", "method", "row", "seconds ↓", "block 1", "block 2", "falls"],
        ["m", "a", "1", "1.23 ± 0.50", "3.0", "", "yes"],
        ["", "b", "2", "–", "3.0", "4.0", "unknown"],
        ["", "c", "3", "2.00", "", "", "no"],  # a spread of zero is that of one run
        ["", "d", "no weights", "", "", "", ""],
        ["", "total", "", "9.0", "9", "", "all"],
        ["n", "no model", "", "", "", "", ""],
    ]
    assert grid.note == "A note."
    assert grid.rows[0].cells[3][0] == Number("m", "rows/0/seconds", "{:.2f}", 1.234)
    assert grid.to_dict()["head"] == grid.texts()[0]


def test_rows_of_a_dict_are_named_by_their_keys() -> None:
    table = Table(rows="plans", columns=(Column("plan", "{#}"), Column("mean", "{/plans/#/mean:g}")))
    docs = {"m": {"data": {"plans": {"auto, fast": {"mean": 2}}}}}
    assert layout(table, docs).texts()[1] == ["m", "auto, fast", "2"]


def test_the_committed_report_is_what_the_templates_make(tmp_path: Path) -> None:
    shutil.copytree(REPORT, tmp_path / "report")
    render_again(tmp_path / "report")
    for name in ("report.html", "claims.json", "summary.json"):
        assert (tmp_path / "report" / name).read_bytes() == (REPORT / name).read_bytes(), name


@pytest.mark.parametrize("option", ["--data-dir", "--models-dir", "--records"])
def test_a_folder_that_is_not_there_is_named(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "sweeps", option, str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith(f"{option} {tmp_path / 'none'} is not a folder\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium")
def test_the_page_fits_a_phone_and_a_desk() -> None:
    """Wide tables scroll by themselves; the page does not."""
    with pytest.importorskip("playwright.sync_api").sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto((REPORT / "report.html").as_uri())
        for width in (390, 1280):
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") == width
        order = page.eval_on_selector_all("section", "found => found.map(one => one.id)")
        assert (order[0], order[-1]) == ("summary", "verdicts")
        assert page.locator("#summary img").count() == 1
        assert page.locator("details[open]").count() == 0
        browser.close()
