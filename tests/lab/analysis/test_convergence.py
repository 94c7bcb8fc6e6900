"""How sweeps approach the exact answer: the curves are those of the loop, and they obey its bound."""

from __future__ import annotations

import math

import pytest
import torch

import jacobiflow as jf
from jacobiflow_lab.analysis.convergence import Approach, convergence
from subjects import NAMES, subject


@pytest.mark.parametrize("name", NAMES)
def test_curves_end_at_the_exact_answer(name: str) -> None:
    s = subject(name)
    z = s.flow.noise(2, seed=3)
    found = convergence(s.flow, z, tol=0, init="previous", guidance=s.guidance, **s.condition(2))
    assert len(found.blocks) == len(s.flow.blocks)
    assert found.samples == 2
    for block in found.blocks:
        assert block.length == len(block.sequential) == s.length
        assert 2 < len(block.jacobi) <= s.length  # the first guess and at most T - 1 sweeps
        assert block.jacobi[-1] < 1e-9
        assert block.sequential[-1] == 0
        assert block.jacobi[0] == pytest.approx(block.sequential[0])  # the first position is given
        assert block.jacobi[0] > 1e-3
        assert all(a >= b for a, b in zip(block.sequential, block.sequential[1:], strict=False))


def test_curves_follow_the_flow_from_block_to_block() -> None:
    s = subject("tarflow-shift")
    z = s.flow.noise(1, seed=0)
    condition = s.condition(1)
    found = convergence(s.flow, z, **condition).blocks
    seq = s.flow.to_prior(z)
    for k, block in enumerate(s.flow.bound_blocks(1, **condition)):
        exact = jf.decode(block, seq, jf.Method(width=1)).x
        for sweeps in (1, 3):
            limited = jf.Method(max_sweeps=sweeps)
            guess = jf.decode(block, seq, limited, on_failure="return").x
            assert found[k].jacobi[sweeps] == pytest.approx((guess - exact).norm().item(), rel=1e-6)
        known = (torch.arange(s.length) if block.order is None else block.order)[:8]
        half = seq.index_copy(1, known, exact[:, known])
        assert found[k].sequential[7] == pytest.approx((half - exact).norm().item())
        seq = exact
    x = s.flow.decode(z, "sequential", **condition).x
    assert torch.allclose(s.flow.from_sequence(seq), x)


@pytest.mark.parametrize("tol", [0.5, 0.05, 1e-3])
def test_a_curve_ends_when_updates_are_within_tol(tol: float) -> None:
    s = subject("maf-affine")
    z = s.flow.noise(2, seed=0)
    found = convergence(s.flow, z, tol=tol)
    out = jf.decode(s.flow.bound_blocks(2)[0], z.unsqueeze(-1), s.flow.plan("uniform", tol=tol)[0])
    assert len(found.blocks[0].jacobi) - 1 == out.stats.blocks[0].sweeps.max()


def test_double_precision_is_a_copy_and_goes_further() -> None:
    s = subject("tarflow-labels", torch.float32)
    z, given = s.flow.noise(2, seed=0), s.condition(2)
    rough, fine = convergence(s.flow, z, **given), convergence(s.flow, z, double=True, **given)
    assert next(s.flow.parameters()).dtype == torch.float32
    assert (rough.dtype, fine.dtype) == ("float32", "float64")
    for a, b in zip(rough.blocks, fine.blocks, strict=True):
        assert b.jacobi[0] == pytest.approx(a.jacobi[0], rel=1e-4)
        assert b.jacobi[-1] < 1e-7 * b.jacobi[0]
    assert fine.blocks[0].jacobi[-1] < rough.blocks[0].jacobi[-1]


def test_ratios_and_whether_they_fall() -> None:
    fast = Approach(length=9, jacobi=(1.0, 0.5, 0.1, 0.002), sequential=(1.0,) * 9)
    assert fast.ratios == pytest.approx((0.5, 0.2, 0.02))
    assert fast.ratio_falls is True
    slow = Approach(length=9, jacobi=(1.0, 0.5, 0.1, 0.05, 0.04, 0.0), sequential=(1.0,) * 9)
    assert slow.ratio_falls is False
    assert slow.ratios[-1] == 0
    none = Approach(length=9, jacobi=(0.0, 0.0), sequential=(0.0,) * 9)
    assert none.ratio_falls is None
    assert math.isnan(none.ratios[0])
    rounding = Approach(length=9, jacobi=(1.0, 0.5, 0.1, 0.01, 1e-9, 9e-10, 8e-10), sequential=(1.0,) * 9)
    assert rounding.ratio_falls is True  # what comes below a millionth is left out
    guess = Approach(length=9, jacobi=(100.0, 99.9, 40.0, 20.0), sequential=(1.0,) * 9)
    assert guess.ratio_falls is False  # it falls only with the first sweep, which depends on the guess


def test_plain_data_has_the_ratios() -> None:
    s = subject("maf-affine")
    doc = convergence(s.flow, s.flow.noise(2, seed=0), init="zeros").to_dict()
    assert doc["init"] == "zeros"
    (first, *_) = doc["blocks"]
    assert first["ratios"][0] == pytest.approx(first["jacobi"][1] / first["jacobi"][0])
    assert isinstance(first["ratio_falls"], bool)


def test_the_first_guess_is_the_one_asked_for() -> None:
    s = subject("tarflow")
    z = s.flow.noise(3, seed=0)
    exact = jf.decode(s.block(0, 3), z, jf.Method(width=1)).x
    found = convergence(s.flow, z, init="zeros").blocks[0]
    assert found.jacobi[0] == pytest.approx(exact[:, 1:].flatten(1).norm(dim=1).mean().item())
