"""Comparisons say what decoding does: same samples, same sweeps, honest distances."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import jacobiflow as jf
from jacobiflow.analysis.compare import Convergence, compare, convergence
from jacobiflow.analysis.plots import save_convergence
from subjects import NAMES, subject

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


@pytest.mark.parametrize("name", NAMES)
def test_convergence_ends_at_the_exact_answer(name: str) -> None:
    s = subject(name)
    z = s.flow.noise(2, seed=3)
    found = convergence(s.flow, z, floor=0, guidance=s.guidance, **s.condition(2))
    assert len(found) == len(s.flow.blocks)
    for block in found:
        assert len(block.jacobi) == len(block.sequential) == s.length
        assert block.jacobi[-1] < 1e-9
        assert block.sequential[-1] == 0
        assert block.jacobi[0] == pytest.approx(block.sequential[0])  # the first position is given
        assert block.jacobi[0] > 1e-3


def test_convergence_follows_the_flow_from_block_to_block() -> None:
    s = subject("tarflow-shift")
    z = s.flow.noise(1, seed=0)
    condition = s.condition(1)
    found = convergence(s.flow, z, floor=0, **condition)
    seq = s.flow.to_prior(z)
    for k, (block, order) in enumerate(s.flow.bound_blocks(1, **condition)):
        ordered = seq if order is None else seq[:, order]
        exact = jf.sequential(block, ordered).x
        for sweeps in (1, 3):
            limited = jf.Method(max_sweeps=sweeps)
            guess = jf.decode(block, ordered, limited, on_failure="return").x
            assert found[k].jacobi[sweeps] == pytest.approx((guess - exact).norm().item(), rel=1e-6)
        half = torch.cat((exact[:, :8], ordered[:, 8:]), dim=1)
        assert found[k].sequential[7] == pytest.approx((half - exact).norm().item())
        seq = exact if order is None else torch.empty_like(exact).index_copy(1, order, exact)
    x = s.flow.decode(z, "sequential", **condition).x
    assert torch.allclose(s.flow.from_sequence(seq), x)


@pytest.mark.parametrize("floor", [0.5, 0.05, 1e-3])
def test_convergence_stops_at_a_share_of_the_answer(floor: float) -> None:
    s = subject("maf-affine")
    z = s.flow.noise(2, seed=0)
    block, order = s.flow.bound_blocks(2)[0]
    seq = s.flow.to_prior(z)
    exact = jf.sequential(block, seq if order is None else seq[:, order]).x
    end = floor * exact.flatten(1).norm(dim=1).mean()
    *before, last = convergence(s.flow, z, floor=floor)[0].jacobi
    assert last < end
    assert all(distance >= end for distance in before)


def test_convergence_ends_in_single_precision() -> None:
    s = subject("tarflow", torch.float32)
    for block in convergence(s.flow, s.flow.noise(2, seed=0)):
        assert len(block.jacobi) < s.length  # float32 would never reach a distance of 0


# Figures


@pytest.mark.parametrize("count", [1, 4, 5])
def test_a_figure_of_any_number_of_blocks(count: int, tmp_path: Path) -> None:
    block = Convergence(jacobi=(1.0, 0.1, 0.0), sequential=(1.0, 0.5, 0.2, 0.0))
    save_convergence([block] * count, tmp_path / "a.png", title="a title")
    with Image.open(tmp_path / "a.png") as picture:
        width, height = picture.size
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 10
    assert width == pytest.approx(372 * min(count, 4), abs=2)
    assert height == pytest.approx(336 * (2 if count > 4 else 1) + 60, abs=2)


@pytest.mark.parametrize(
    "steps", [(0.0,), (0.0, 0.0), (math.nan, math.nan), (math.inf, 1.0, 0.0), (1e-30, 1e30)]
)
def test_a_figure_of_odd_numbers(steps: tuple[float, ...], tmp_path: Path) -> None:
    odd = Convergence(jacobi=steps, sequential=steps)
    save_convergence([odd, odd], tmp_path / "a.png", title="100% $odd_\\frac{$ names")
    assert (tmp_path / "a.png").stat().st_size > 1000
