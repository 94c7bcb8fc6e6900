"""The rule of small and still."""

from __future__ import annotations

import dataclasses
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core.method import Unit
from jacobiflow.core.stopping import ROUNDING, backends_know, changes, judge
from jacobiflow.kernels.backend import TorchEngine

EPS = torch.finfo(torch.float64).eps
HUGE = torch.finfo(torch.float64).max


def one(
    new: float, seen: float, z: float = 0.0, log_slope: float = 0.0, unit: Unit = "relative"
) -> tuple[float, bool]:
    """The rule for a single number."""
    given = (torch.tensor([[[v]]], dtype=torch.float64) for v in (new, seen, z, log_slope))
    change, still = changes(*given, jf.Method(unit=unit))
    return change.item(), bool(still)


def test_absolute() -> None:
    assert one(3.0, 2.5, z=100.0, log_slope=5.0, unit="absolute") == (0.5, False)
    assert one(0.0, 7 * EPS, unit="absolute") == (7 * EPS, True)  # in units of max(1, |x|)
    assert not one(0.0, 9 * EPS, unit="absolute")[1]
    assert one(1024.0, 1024 * (1 + 7 * EPS), unit="absolute")[1]
    assert not one(1024.0, 1024 * (1 + 9 * EPS), unit="absolute")[1]


def test_relative() -> None:
    assert one(4.0, 3.0) == (0.25, False)  # of |x|
    assert one(1.0, 0.0, z=2.0, log_slope=math.log(4))[0] == pytest.approx(1 / 8)  # of |z dx/dz|
    assert one(1.0, 0.0, z=-2.0, log_slope=math.log(4))[0] == pytest.approx(1 / 8)
    assert one(1.0, 0.0, z=1e-9, log_slope=5.0)[0] == 1.0  # of |dx/dz| alone it would be small
    assert one(1e-6, 1e-6 * (1 + 7 * EPS))[1]
    assert not one(1e-6, 1e-6 * (1 + 9 * EPS))[1]
    assert one(1e-6, 2e-6) == (1.0, False)


def test_at_zero_only_what_did_not_move_is_small() -> None:
    assert one(0.0, 0.0) == (0.0, True)
    assert one(0.0, 0.0, log_slope=-math.inf) == (0.0, True)  # a variable of scale 0
    assert one(0.0, 1e-300) == (HUGE, False)  # finite: this is no overflow
    assert one(5e-324, 1.0) == (HUGE, False)
    assert one(0.0, 1e-20, z=1.0) == (1e-20, True)


@pytest.mark.parametrize("unit", get_args(Unit))
@pytest.mark.parametrize("log_slope", [0.0, math.inf, math.nan])
@pytest.mark.parametrize("z", [0.0, 1.0])
@pytest.mark.parametrize(
    ("new", "seen"),
    [(math.inf, 0.0), (math.inf, math.inf), (-math.inf, 1.0), (math.nan, 0.0), (0.0, math.inf)],
)
def test_what_is_not_finite_is_neither(new: float, seen: float, z: float, log_slope: float, unit: Unit) -> None:
    change, still = one(new, seen, z, log_slope, unit)
    assert math.isnan(change)
    assert not still


@pytest.mark.parametrize(("z", "log_slope"), [(1.0, 800.0), (0.0, 800.0), (1e300, 100.0), (1.0, math.nan)])
def test_a_unit_that_overflows_makes_nothing_small(z: float, log_slope: float) -> None:
    assert one(2.0, 1.0, z, log_slope) == (0.5, False)
    assert one(2.0, 2.0, z, log_slope) == (0.0, True)


def test_each_number_has_its_own_unit() -> None:
    """Slopes are not summed over a position, and one number that moves keeps its position moving."""
    new = torch.tensor([[[1e-6, 1e6]]], dtype=torch.float64)
    seen = new + torch.tensor([1e-8, 0.0], dtype=torch.float64)
    slopes = torch.tensor([[[-14.0, 14.0]]], dtype=torch.float64)
    change, still = changes(new, seen, torch.ones_like(new), slopes, jf.Method(unit="relative"))
    assert change.item() == pytest.approx(1e-2, rel=0.2)
    assert not bool(still)


class Doubling:
    """x_t = 2 x_{t-1} + c z_t, from x_0 = c z_0: every sweep solves one more position, whatever c is."""

    length = 12

    def __init__(self, c: float, dtype: torch.dtype) -> None:
        self.c, self.dtype = c, dtype

    def select(self, rows: Tensor) -> Doubling:
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        return ()

    def new_cache(self, n: int) -> None:
        return None

    def first(self, n: int) -> Tensor:
        return torch.zeros(n, 1, 1, dtype=self.dtype)

    def all_params(self, x: Tensor) -> Tensor:
        return 2 * torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return theta + self.c * z, torch.full_like(z, math.log(self.c))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_loop_keeps_the_unit_of_its_method(dtype: torch.dtype) -> None:
    tiny = ROUNDING * torch.finfo(dtype).eps * 2.0**-20
    z = torch.rand(3, 12, 1, dtype=dtype, generator=torch.Generator().manual_seed(0)) + 0.5
    both = Doubling(tiny, dtype)  # conditioner and bijector
    block = jf.Block(both, both, TorchEngine(both, both))
    exact = jf.decode(block, z, jf.Method(width=1)).x
    out = jf.decode(block, z, jf.Method(init="zeros", unit="relative"))
    assert torch.equal(out.x, exact)
    assert out.stats.blocks[0].sweeps.tolist() == [11] * 3
    loose = jf.decode(block, z, jf.Method(init="zeros"))  # absolute: so little is rounding
    assert loose.stats.blocks[0].sweeps.max() < 11
    assert not torch.equal(loose.x, exact)


@pytest.mark.parametrize("width", [None, 4])
def test_the_change_that_is_reported_was_accepted_within_tol(width: int | None) -> None:
    """The position after the accepted ones is final because of its inputs, however far it moved itself."""
    change = torch.tensor([[1e-3, 0.5, 0.0, 0.0], [1e-3, 2e-3, 1e-3, 5e-3], [0.0, 0.5, 0.0, 0.0]])
    own, at_end = torch.ones(3, 4, dtype=torch.bool), torch.ones(3, dtype=torch.bool)
    verdict = judge(change, change == 0, own, jf.Method(width=width, tol=1e-2), at_end)
    assert verdict.advance.tolist() == ([1, 4, 2] if width is None else [2, 4, 2])
    assert verdict.loose.tolist() == [width is not None, True, False]
    assert verdict.accepted.tolist() == pytest.approx([0.0 if width is None else 1e-3, 5e-3, 0.0])


def test_a_method_with_a_setting_that_backends_do_not_know_is_left_to_torch() -> None:
    other = dataclasses.make_dataclass("Other", [("rule", str, "max")], bases=(jf.Method,), frozen=True)
    assert backends_know(jf.Method(tol=0.1, width=3))
    assert not backends_know(other(tol=0.1, width=3, rule="mean"))
