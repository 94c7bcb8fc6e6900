"""The committed report, and the paper's own figures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jacobiflow_lab.paper import paper_figures as figures
from jacobiflow_lab.paper.claims import CLAIMS, judge_claims
from jacobiflow_lab.paper.models import SCALES
from jacobiflow_lab.paper.reading import check
from jacobiflow_lab.paper.registry import ITEMS

REPORT = Path(__file__).parents[3] / "docs" / "report"
PAPER = Path(__file__).parents[3].parent / "shared" / "reference" / "paper.tex"


def test_committed_report_equals_its_json() -> None:
    numbers, pictures, wrong = check(REPORT / "report.html")
    assert wrong == []
    assert numbers > 100
    assert pictures > 5
    for file in REPORT.glob("*/*.json"):
        doc = json.loads(file.read_text())
        assert doc["commit"]
        assert doc["command"].startswith("jacobiflow reproduce")
        assert "data" in doc or "missing" in doc
        assert not any(p["restricted"] for p in doc.get("pictures", ()) if (file.parent / p["file"]).exists())
    docs = {
        item: {f.stem: json.loads(f.read_text()) for f in (REPORT / item).glob("*.json")} for item in ITEMS
    }
    said = {c["name"]: c["models"] for c in json.loads((REPORT / "claims.json").read_text())}
    assert said == {c["name"]: c["models"] for c in judge_claims(docs)}


def test_speedups_of_the_paper_are_those_of_its_times() -> None:
    for methods in figures.COMPARISON.values():
        base = methods["sequential"][0]
        for seconds, _, speedup, *_ in methods.values():
            assert base / seconds == pytest.approx(speedup, abs=0.06)
    for lines in figures.RUNTIME.values():
        *parts, total = lines
        assert sum(p[1] for p in parts) == pytest.approx(total[1], abs=0.03)
        assert sum(p[3] for p in parts) == pytest.approx(total[3], abs=0.03)
    seconds = [s for s, *_ in figures.ISING.values()]
    assert seconds[0] / seconds[1] == pytest.approx(figures.ISING_SPEEDUP, abs=0.06)
    slow, fast = figures.MAF_MNIST.values()
    assert slow / fast == pytest.approx(figures.MAF_MNIST_SPEEDUP, abs=0.06)


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's text is not here")
def test_figures_of_the_paper_are_in_its_text() -> None:
    text = PAPER.read_text(encoding="utf-8")
    printed = set(re.findall(r"-?\d+(?:\.\d+)?", text))
    for methods in figures.COMPARISON.values():
        for seconds, spread, _, fid, clip, brisque in methods.values():
            shown = [seconds, fid, clip, brisque, *([] if spread is None else [spread])]
            assert {f"{v:.2f}" for v in shown} <= printed
    assert {f"{v:g}" if v >= 100 else f"{v:.1f}" for row in figures.SWEEPS.values() for v in row} <= printed
    for lines in figures.RUNTIME.values():
        for _, a, share, b, part, _ in lines:
            assert {f"{a:.2f}", f"{b:.2f}"} <= printed
            assert {f"{share:g}" if share == 100 else f"{share:.1f}"} <= printed
            assert {f"{part:g}" if part == 100 else f"{part:.1f}"} <= printed
    assert {f"{v:.5f}" for v in figures.RECONSTRUCTION.values()} <= printed
    assert {f"{s:.2f}" for s, _ in figures.GENERATORS.values()} <= printed


@pytest.mark.skipif(not PAPER.exists(), reason="the paper's text is not here")
def test_every_table_and_figure_has_an_item() -> None:
    """Numbers as LaTeX would give them: main text first, then the appendix with an A."""
    text = PAPER.read_text(encoding="utf-8")
    body, appendix = text.split("\\appendix", 1)
    named = " ".join(item.shows for item in ITEMS.values())
    named = re.sub(r"(Figure|Table)s (\w+), (\w+) and (\w+)", r"\1 \2 \1 \3 \1 \4", named)
    named = re.sub(r"(Figure|Table)s (\w+) and (\w+)", r"\1 \2 \1 \3", named)
    wanted = []
    for part, prefix in ((body, ""), (appendix, "A")):
        for kind, word in (("(?:wrap)?figure", "Figure"), ("table", "Table")):
            count = len(re.findall(rf"\\begin{{{kind}\*?}}", part))
            wanted += [f"{word} {prefix}{i + 1}" for i in range(count)]
    assert [w for w in wanted if not re.search(rf"\b{w}\b", named)] == []


def test_every_claim_belongs_to_an_item() -> None:
    assert {claim.item for claim in CLAIMS} <= set(ITEMS)
    assert len({claim.name for claim in CLAIMS}) == len(CLAIMS)


def test_an_hour_was_enough_and_is_what_the_command_expects() -> None:
    took = json.loads((REPORT / "summary.json").read_text())["minutes"]
    scale = SCALES["cpu"]
    expected = sum(item.minutes(scale, m) for item in ITEMS.values() for m in item.models(scale))
    assert 0.5 * expected < took < expected <= 60
