"""Elementwise maps: inverse, log-derivative, the conventions of other libraries."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jacobiflow.core.bijectors import ExpAffine, ScaleAffine, Shift, Spline

MAPS = {
    "exp": ExpAffine(),
    "shift": Shift(),
    "softplus": ScaleAffine("softplus"),
    "sigmoid": ScaleAffine("sigmoid", 0.05),
    "spline": Spline(),
    "spline-2": Spline(bins=2, bound=1.5),
    "spline-20": Spline(bins=20, bound=3.0),
}


def test_rounding_does_not_lead_out_of_a_bin() -> None:
    """In steep and narrow bins the root of the quadratic may be just outside of [0, 1]."""
    f, draw = Spline(bins=8, bound=3.3), torch.Generator().manual_seed(0)
    z = 2 * torch.randn(200_000, 1, generator=draw)
    theta = 25 * torch.randn(200_000, f.params, generator=draw)
    exact = f.inverse(z.double(), theta.double())[1]
    assert (f.inverse(z, theta)[1] - exact).abs().max() < 50  # it was 200 and more, or not a number


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("dim", [1, 4])
def test_inverse_and_slope(name: str, dim: int) -> None:
    f = MAPS[name]
    draw = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(50, 6, dim, generator=draw, dtype=torch.float64)
    theta = 1.5 * torch.randn(50, 6, f.params * dim, generator=draw, dtype=torch.float64)
    x.requires_grad_()
    z, log_dz = f.forward(x, theta)
    back, log_dx = f.inverse(z, theta)
    assert (back - x).abs().max() < 1e-10
    assert (log_dz + log_dx).abs().max() < 1e-10
    (slope,) = torch.autograd.grad(z.sum(), x)
    assert (slope > 0).all()
    assert (slope.log() - log_dz).abs().max() < 1e-9


@given(st.integers(0, 10_000), st.integers(2, 12), st.floats(0.5, 6))
def test_splines_are_monotone_and_the_identity_outside(seed: int, bins: int, bound: float) -> None:
    f = Spline(bins=bins, bound=bound)
    draw = torch.Generator().manual_seed(seed)
    theta = (4 * torch.randn(1, f.params, generator=draw, dtype=torch.float64)).expand(801, -1)
    x = torch.linspace(-2 * bound, 2 * bound, 801, dtype=torch.float64)[:, None]
    z, log_dz = f.forward(x, theta)
    assert (z.diff(dim=0) > 0).all()
    outside = x.abs() >= bound
    assert torch.equal(z[outside], x[outside])
    assert (log_dz[outside] == 0).all()
    assert (f.inverse(z, theta)[0] - x).abs().max() < 1e-9 * bound / f.min_slope


def test_zero_parameters_are_the_identity() -> None:
    x = torch.linspace(-4, 4, 17, dtype=torch.float64)[:, None]
    for f in (ExpAffine(), Shift(), Spline()):
        z, log_dz = f.forward(x, torch.zeros(17, f.params, dtype=torch.float64))
        assert (z - x).abs().max() < 1e-12
        assert log_dz.abs().max() < 1e-12


def test_conventions() -> None:
    one, theta = torch.ones(1), torch.tensor([0.7, -0.2])
    assert ExpAffine().forward(one, theta)[0].item() == pytest.approx((1 + 0.2) * math.exp(-0.7))
    soft = math.log1p(math.exp(0.7)) + 1e-3
    assert ScaleAffine("softplus").forward(one, theta)[0].item() == pytest.approx(soft - 0.2)
    gate = 1 / (1 + math.exp(-2.7)) + 1e-3
    assert ScaleAffine("sigmoid").inverse(one, theta)[0].item() == pytest.approx((1 + 0.2) / gate)
    with pytest.raises(ValueError, match="bins"):
        Spline(bins=1)
    with pytest.raises(ValueError, match="bins"):
        Spline(bins=5000)


def test_not_a_number_stays_one() -> None:
    """No map hides a failure."""
    bad = torch.full((1, 1), math.nan)
    for f in MAPS.values():
        assert f.inverse(bad, torch.zeros(1, f.params))[0].isnan().all()
