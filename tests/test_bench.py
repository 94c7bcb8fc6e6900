"""`make bench`: figures in documents are those of the records, and roads that lost solve what they claim."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import jacobiflow as jf
from subjects import maf, subject, tarflow

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks import __main__ as program
from benchmarks import auto, before, goals, harness, ladder, regimes, roads
from benchmarks.__main__ import PROGRAMS, SECTIONS

from jacobiflow.flows.calibration import calibrate

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "docs/bench"


def test_the_tables_of_documents_are_those_of_the_records() -> None:
    docs = harness.documents(BENCH)
    assert set(docs) <= set(SECTIONS)
    text = (ROOT / "docs/performance.md").read_text()
    named = re.findall(r"<!-- bench:([\w-]+) -->", text)
    assert set(named) <= set(SECTIONS)
    assert len(set(named)) == len(named) >= 10
    assert harness.filled(text, docs) == text
    for page, table in ("README.md", "summary"), ("docs/training.md", "training"):
        text = (ROOT / page).read_text()
        assert f"<!-- bench:{table} -->" in text
        assert harness.filled(text, docs) == text
    for name in docs:
        assert harness.table(docs[name]) in (BENCH / "README.md").read_text()


@pytest.mark.parametrize("path", sorted(BENCH.glob("*.json")), ids=lambda p: p.stem)
def test_a_record_says_where_it_comes_from(path: Path) -> None:
    doc = json.loads(path.read_text())
    if "section" not in doc:
        pytest.skip("another program's")
    assert doc["section"] == path.stem
    assert doc["rows"]
    for key in ("command", "commit", "torch", "cpu", "threads", "repeats", "busy_elsewhere"):
        assert doc[key] is not None
    for row in doc["rows"]:
        if "ratio" in row and "method" in row:
            assert row["deviation"] is not None


def test_a_section_that_is_not_run_keeps_its_record(tmp_path: Path) -> None:
    rows = [{"batch": 1, "method": "ours", "seconds": 0.5, "ratio": 2.0, "deviation": 1e-3}]
    old = harness.Section("old", lambda repeats: rows)
    harness.record("batch", old, 7, tmp_path, "make it")
    before = (tmp_path / "batch.json").read_bytes()
    (tmp_path / "other.json").write_text("{}")
    again = [row | {"length": 49, "seconds": 0.25} for row in rows]
    harness.record("length", harness.Section("new", lambda repeats: again), 7, tmp_path, "make it")
    page = tmp_path / "page.md"
    page.write_text("Before.\n<!-- bench:length -->\nold\n<!-- end -->\nAfter.\n")
    harness.write_tables(tmp_path, [page])
    assert (tmp_path / "batch.json").read_bytes() == before
    assert "| 1 | ours | 500 ms | 2x | 0.001 |" in (tmp_path / "README.md").read_text()
    assert page.read_text().startswith("Before.\n<!-- bench:length -->\n| batch | method |")
    assert "250 ms" in page.read_text()
    assert "old" not in page.read_text()
    assert page.read_text().endswith("<!-- end -->\nAfter.\n")
    assert "![time against sequence length](bench/length.png)" in page.read_text()
    assert (tmp_path / "batch.png").exists()
    assert (tmp_path / "length.png").exists()


def test_races_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []
    clock = iter(range(1000))
    monkeypatch.setattr(harness.time, "perf_counter", lambda: float(next(clock)))
    runs: Any = {name: lambda name=name: (turns.append(name), torch.ones(2))[1] for name in ("peer", "ours")}
    found = harness.race("peer", runs, torch.zeros(2), 3, {"ours": 0.5}, batch=4)
    assert turns == ["peer", "ours"] * 4
    assert [row["ratio"] for row in found] == [1, 1]
    assert [row["deviation"] for row in found] == [1, 1]
    assert [row["distance"] for row in found] == [None, 2]


def test_arithmetic_is_counted() -> None:
    flow = maf(0.5, features=3, blocks=1, hidden=(4,))
    net = flow.blocks[0]
    used = (net.masked(0) != 0).sum() + (net.head.weight * net.head_mask != 0).sum()
    assert harness.arithmetic(flow) == 2 * used
    flow = tarflow(0.2, blocks=1, layers_per_block=1)
    w, t, d = 32, 16, 4
    assert harness.arithmetic(flow) == 2 * t * (12 * w * w + 3 * w * d) + 2 * t * t * w


@pytest.mark.parametrize("name", [name for name in roads.ROADS if "threads" not in name])
@pytest.mark.parametrize("kind", ["tarflow", "maf-affine"])
def test_roads_that_lost_solve_the_block(kind: str, name: str) -> None:
    one = subject(kind, torch.float32)
    block, z = one.block(1, 8), one.flow.to_prior(one.flow.noise(8, seed=0))
    exact = jf.decode(block, z, jf.Method(width=1)).x
    roads.MEANS[id(block)] = exact.mean(0, keepdim=True)
    x, worth = roads.ROADS[name](block, z, 1e-5)
    assert (x - exact).abs().max() < 1e-3
    assert 0 < worth < 2 * block.length


def test_every_section_and_program_is_there() -> None:
    assert {"tarflow", "batch", "length", "maf-1", "maf-100", "zuko-maf", "zuko-nsf"} <= set(SECTIONS)
    assert {"auto", "memory", "operators", "compile", "weights", "roads"} <= set(SECTIONS)
    for name in PROGRAMS:
        assert (ROOT / f"benchmarks/{name}.py").exists()


def test_a_name_stands_for_all_sections_that_begin_with_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran: list[str] = []
    monkeypatch.setattr(program, "record", lambda name, *_: ran.append(name))
    monkeypatch.setattr(sys, "argv", ["benchmarks", "ladder", "maf-1", "--out", str(tmp_path)])
    program.main()
    assert ran == ["ladder-mnist", "ladder-mnist-torch", "ladder-cifar", "ladder-cifar-torch", "maf-1"]


def test_the_rungs_of_a_ladder_give_the_same_sample() -> None:
    flow = tarflow(0.25, blocks=2).float().eval().requires_grad_(False)
    calibrate(flow, noises=64)
    z = flow.noise(1, seed=0)
    found = {name: run() for name, run in ladder.rungs(flow, z, "torch").items()}
    (plain, *exact), (sweeps, windows, calibrated) = list(found.values())[:3], list(found.values())[3:]
    assert [count for _, count in (plain, *exact)] == [2 * 15] * 3
    assert all((x - plain[0]).abs().max() < 1e-4 for x, _ in exact)
    assert 30 > sweeps[1] > windows[1] >= calibrated[1]
    assert max((x - plain[0]).abs().max() for x, _ in (windows, calibrated)) < 0.05


def test_a_ladder_is_measured_on_the_model_that_is_named(tmp_path: Path) -> None:
    tarflow(0.25, blocks=2).float().save(tmp_path)
    rows = ladder.sections(str(tmp_path))["ladder-mnist"].rows(1)
    assert rows[0]["over_the_plain_loop"] == 1
    assert [row["evaluations_in_series"] for row in rows][:3] == [30] * 3
    assert rows[1]["deviation"] == 0


def test_the_map_names_the_fastest_method() -> None:
    cell = {"length": 65, "sequential": 64.0, "whole": 10.0, "windows": {"8": 1.0, "32": 4.0}}
    assert regimes.window_sweeps(4, 65, 8) == 4 + 2 * 64 / 8
    assert regimes.winner(cell, 4) == ("window of 8", 64 / 20)
    assert regimes.winner(cell | {"whole": 2.0}, 4) == ("whole sweeps", 64 / 8)
    assert regimes.winner(cell, 60) == ("sequential", 1.0)


def test_a_goal_is_a_limit_on_one_side() -> None:
    assert [goals.row("time", 1, 1.5, now)["met"] for now in (1.4, 1.6)] == ["yes", "no"]
    assert [goals.row("gain", 1, 1.5, now, least=True)["met"] for now in (1.4, 1.6)] == ["no", "yes"]


def test_kernels_are_compared_on_the_same_calls() -> None:
    """Now and before: sweeps of the same positions, and a bound for each."""
    machine = SimpleNamespace(peak=lambda: 1e9, reading=lambda size: 1e9)
    case = goals.Case(machine, before.made("mnist"), 2)
    names = ("1", "whole", "sequential")
    runs, found = goals.calls(case, names), goals.bounds(case, names)
    assert [runs["1"](), runs["whole"]()][1].shape[1] == 195
    assert runs.keys() == found.keys() == set(names)
    assert found["1"] < found["whole"] < found["sequential"] < 195 * case.limits(195, 1)[2]
    assert set(before.CALLS) >= {("mnist", 16), ("cifar", 16), ("afhq", 1)}
    assert goals.row_count("cifar/4/16") == 64
    assert goals.row_count("cifar/4/whole") == 0


def test_sweeps_are_counted_until_the_error_is_small() -> None:
    one = subject("tarflow", torch.float32)
    block, z = one.block(1, 4), one.flow.to_prior(one.flow.noise(4, seed=0))
    exact = jf.decode(block, z, jf.Method(width=1)).x
    loose, tight = (auto._sweeps_until(block, z, exact, jf.Method(init="zeros"), error) for error in (0.5, 1e-3))
    assert 0 < loose < tight < block.length
