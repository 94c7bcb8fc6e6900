"""Comparisons say what decoding does: same samples, same sweeps, honest distances."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow.flows.compare import PLAIN, compare, has_plain_loop
from jacobiflow.flows.guidance import Guidance
from subjects import subject

PLANS = ("sequential", "uniform", "selective")


def test_rows_are_what_decode_says() -> None:
    s = subject("tarflow-labels")
    z, labels, said = s.flow.noise(5, seed=0), torch.tensor([0, 1, 2, 0, 1]), []

    def options(plan: str) -> dict[str, Any]:
        return {} if plan == "sequential" else {"tol": 0.1}

    rows, outs = compare(
        s.flow,
        z,
        PLANS,
        [5, 2, 5],
        repeats=2,
        options=options,
        condition=lambda n: {"labels": labels[:n]},
        progress=said.append,
    )
    assert [(r.batch, r.plan) for r in rows] == [(b, p) for b in (2, 5) for p in PLANS]
    runs = [(b, i, p) for b in (2, 5) for i in (1, 2) for p in (PLANS if i == 1 else PLANS[::-1])]
    assert said == [f"batch {b}, run {i} of at most 2: {p}" for b, i, p in runs]
    for row in rows:
        out = s.flow.decode(z[: row.batch], row.plan, labels=labels[: row.batch], **options(row.plan))
        exact = s.flow.decode(z[: row.batch], "sequential", labels=labels[: row.batch])
        off = (out.x - exact.x).abs()
        assert row.largest == off.max()
        assert row.mean == pytest.approx(off.mean().item())
        assert row.sweeps == tuple(b.sweeps.double().mean().item() for b in out.stats.blocks)
        assert row.status == out.stats.status.name
        assert row.seconds > 0
        assert row.speedup > 0
        assert (row.largest == 0) == (row.plan == "sequential")
        if row.batch == 5:
            assert torch.equal(outs[row.plan].x, out.x)
    assert all(r.speedup == 1 for r in rows if r.plan == "sequential")


def test_only_the_plans_asked_for_each_once() -> None:
    s = subject("maf-affine")
    rows, outs = compare(s.flow, s.flow.noise(2, seed=0), ["uniform", "uniform"], [2], repeats=1)
    assert [r.plan for r in rows] == ["uniform"]
    assert outs.keys() == {"sequential", "uniform"}


def test_samples_without_an_answer_are_told_by_status_alone() -> None:
    s = subject("maf-affine")
    z = s.flow.noise(3, seed=0)
    z[1, 4] = math.nan
    (row,), _ = compare(s.flow, z, ["uniform"], [3], repeats=1)
    assert row.status == "NONFINITE"
    assert 0 < row.mean <= row.largest < 1e-2
    (row,), _ = compare(s.flow, torch.full_like(z, math.nan), ["uniform"], [3], repeats=1)
    assert math.isnan(row.largest)
    assert math.isnan(row.mean)


def test_the_plain_loop_is_the_baseline() -> None:
    flow = subject("tarflow-labels", torch.float32).flow
    z, labels = flow.noise(3, seed=0), torch.tensor([0, 1, 2])
    rows, outs = compare(flow, z, ["sequential", PLAIN], [3], repeats=3, condition=lambda n: {"labels": labels[:n]})
    assert [r.plan for r in rows] == [PLAIN, "sequential"]
    assert (rows[0].speedup, rows[0].stable, rows[0].sweeps, rows[0].backend) == (1, True, (), "torch")
    assert rows[1].speedup == pytest.approx(rows[0].seconds / rows[1].seconds)
    assert 0 < rows[0].largest < 1e-4
    assert torch.allclose(outs[PLAIN].x, flow.decode(z, "sequential", labels=labels).x, atol=1e-4)
    assert has_plain_loop(flow, Guidance())
    assert not has_plain_loop(flow, Guidance(1.0))
    assert not has_plain_loop(subject("tarflow-shift").flow, Guidance())
    assert not has_plain_loop(subject("maf-affine").flow, Guidance())


def test_runs_end_when_speed_ups_are_stable(monkeypatch: pytest.MonkeyPatch) -> None:
    s = subject("maf-affine")
    clock = iter(range(1000))
    for slow, runs in ((False, 3), (True, 7)):

        def decode(*_: Any, slow: bool = slow, **__: Any) -> jf.Decoded:
            """Every third run takes ten times as long, or none does."""
            out = s.decode(s.flow.noise(2, seed=0), "sequential")
            seconds = 10.0 if slow and next(clock) % 3 == 0 else 1.0
            return replace(out, stats=replace(out.stats, seconds=seconds))

        monkeypatch.setattr("jacobiflow.flows.compare._decode", decode)
        said: list[str] = []
        rows, _ = compare(s.flow, s.flow.noise(2, seed=0), ["uniform"], [2], repeats=7, progress=said.append)
        assert len(said) == 2 * runs
        assert rows[0].stable is not slow
        assert rows[0].gain == ("too noisy" if slow else "1x")


@pytest.mark.parametrize(("budget", "runs"), [(1.0, (3, 3)), (40.0, (10, 10)), (1e9, (12, 12))])
def test_runs_end_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch, budget: float, runs: tuple[int, int]) -> None:
    """But not before there are enough for a speed-up. Each batch size has its share of the time."""
    s, now = subject("maf-affine"), [0.0]

    def decode(*_: Any, **__: Any) -> jf.Decoded:
        now[0] += 1.0
        return s.decode(s.flow.noise(2, seed=0), "sequential")

    monkeypatch.setattr("jacobiflow.flows.compare._decode", decode)
    monkeypatch.setattr("jacobiflow.flows.compare.perf_counter", lambda: now[0])
    monkeypatch.setattr("jacobiflow.flows.compare.STABLE", -1.0)
    z, said = s.flow.noise(2, seed=0), list[str]()
    rows, _ = compare(s.flow, z, ["sequential", "uniform"], [1, 2], repeats=12, budget=budget, progress=said.append)
    assert [row.runs for row in rows] == [runs[0], runs[0], runs[1], runs[1]]
    assert said[-1] == f"batch 2, run {runs[1]} of at most {runs[1]}: " + ("uniform" if runs[1] % 2 else "sequential")
