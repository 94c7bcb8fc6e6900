"""The committed report, and the paper's own figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jacobiflow_lab.paper.check_report import check
from jacobiflow_lab.paper.claims import CLAIMS, judge_claims
from jacobiflow_lab.paper.paper_items import PAPER_ITEMS
from jacobiflow_lab.paper.registry import every_item
from jacobiflow_lab.paper.report import HEADLINES
from jacobiflow_lab.paper.tables import sections

REPORT = Path(__file__).parents[3] / "docs" / "report"
PAPER = Path(__file__).parents[3].parent / "shared" / "reference" / "paper.tex"


def test_committed_report_equals_its_json() -> None:
    numbers, pictures, wrong = check(REPORT / "report.html")
    assert wrong == []
    assert sum(file.stat().st_size for file in REPORT.rglob("*")) < 6_000_000
    assert numbers > 100
    assert pictures > 5
    for file in REPORT.glob("*/*.json"):
        doc = json.loads(file.read_text())
        assert doc["commit"]
        assert doc["command"].startswith("jacobiflow reproduce")
        assert "data" in doc or "missing" in doc
    assert not list(REPORT.rglob("*.png"))  # they are in the page
    docs = {item: {f.stem: json.loads(f.read_text()) for f in (REPORT / item).glob("*.json")} for item in every_item()}
    said = {c["name"]: c["models"] for c in json.loads((REPORT / "claims.json").read_text())}
    assert said == {c["name"]: c["models"] for c in judge_claims(docs)}


def number(cell: str) -> float:
    """The first number of a cell of the paper's tables."""
    return float(re.findall(r"-?\d+(?:\.\d+)?", cell)[0])


def rows_of(item: str) -> list[dict[str, str]]:
    """The rows of an item's first table of the paper by heading; the second of two equal headings wins."""
    table = PAPER_ITEMS[item].tables[0]
    return [dict(zip(table.head, row, strict=True)) for row in table.rows]


def test_speedups_of_the_paper_are_those_of_its_times() -> None:
    rows = rows_of("comparison")
    base = {row["data"]: number(row["time, s ↓"]) for row in rows if row["method"] == "sequential"}
    assert len(base) == 3
    for row in rows:
        assert base[row["data"]] / number(row["time, s ↓"]) == pytest.approx(number(row["speed-up ↑"]), abs=0.06)
    for item, speedup in (("maf-ising", 15.7), ("maf-mnist", 18.4)):
        slow, fast = (number(row["seconds"]) for row in rows_of(item))
        assert slow / fast == pytest.approx(speedup, abs=0.06)
        assert f"{speedup}x" in PAPER_ITEMS[item].tables[0].note


def test_seconds_of_the_papers_layers_add_up() -> None:
    rows = rows_of("runtime")
    for data in ("CIFAR-10", "CIFAR-100", "AFHQ"):
        lines = {row["layer"]: row for row in rows if row["data"] == data}
        total = lines.pop("total")
        assert len(lines) == 4
        for column in ("sequential s", "selective s"):
            found = sum(number(line[column]) for line in lines.values())
            assert found == pytest.approx(number(total[column]), abs=0.03)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's text is not here")
def test_figures_of_the_paper_are_in_its_text() -> None:
    text = PAPER.read_text(encoding="utf-8")
    printed = set(re.findall(r"-?\d+(?:\.\d+)?", text))
    for item, paper in PAPER_ITEMS.items():
        for row in (row for table in paper.tables[:1] for row in table.rows):
            numbers = set(re.findall(r"-?\d+(?:\.\d+)?", " ".join(row[1:])))
            assert numbers <= printed, (item, row)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's text is not here")
def test_every_table_and_figure_has_an_item() -> None:
    """Numbers as LaTeX would give them: main text first, then the appendix with an A."""
    text = PAPER.read_text(encoding="utf-8")
    body, appendix = text.split("\\appendix", 1)
    named = " ".join(paper.shows for paper in PAPER_ITEMS.values())
    named = re.sub(r"(Figure|Table)s (\w+), (\w+) and (\w+)", r"\1 \2 \1 \3 \1 \4", named)
    named = re.sub(r"(Figure|Table)s (\w+) and (\w+)", r"\1 \2 \1 \3", named)
    wanted = []
    for part, prefix in ((body, ""), (appendix, "A")):
        for kind, word in (("(?:wrap)?figure", "Figure"), ("table", "Table")):
            count = len(re.findall(rf"\\begin{{{kind}\*?}}", part))
            wanted += [f"{word} {prefix}{i + 1}" for i in range(count)]
    assert [w for w in wanted if not re.search(rf"\b{w}\b", named)] == []


def test_every_section_has_a_measurement_and_every_claim_an_item() -> None:
    assert {name for item in every_item() for name in sections(item)} == set(PAPER_ITEMS)
    for claim in CLAIMS:
        assert claim.item in every_item()
        assert (claim.section or claim.item) in PAPER_ITEMS
    for item in every_item().values():
        assert set(item.uses) <= set(list(every_item())[: list(every_item()).index(item.name)])  # they run before it
    assert set(HEADLINES) <= {claim.name for claim in CLAIMS}


def test_the_paper_is_quoted_where_its_numbers_decide() -> None:
    """The numbers that pass the rules are those of the paper's tables."""
    printed = {claim.name: claim.printed for claim in CLAIMS}
    rows = rows_of("comparison")
    for found, data in zip(printed["faster"], ("CIFAR-10", "CIFAR-100", "AFHQ"), strict=True):
        for row in rows:
            if row["data"] == data:
                assert found[row["method"]] == number(row["time, s ↓"])
    for found, row in zip(printed["reconstruction"], rows_of("reconstruction"), strict=True):
        assert found["mean squared error"] == number(row["mean squared error"])
    for found, row in zip(printed["later-blocks"], rows_of("sweeps"), strict=True):
        assert found["second block"] == number(row["layer 2"])
    for found, (slow, fast) in zip(printed["quality"], ((9.71, 10.20), (8.22, 8.19), (15.42, 15.44)), strict=True):
        assert found["FID change"] == pytest.approx(fast / slow - 1, abs=1e-6)
