"""Comparisons say what decoding does: same samples, same sweeps, honest distances."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from jacobiflow.flows.compare import compare
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
    assert said == [f"batch {b}: {p}" for b in (2, 5) for _ in range(2) for p in PLANS]
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
