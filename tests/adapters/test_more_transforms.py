"""Transforms beyond the usual ones: UMNN, and whatever zuko's AutoregressiveTransform can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zuko
from nflows.transforms import CompositeTransform
from torch import Tensor, nn
from zuko.flows.autoregressive import MaskedAutoregressiveTransform
from zuko.transforms import (
    AutoregressiveTransform,
    ComposedTransform,
    DependentTransform,
    MonotonicAffineTransform,
    MonotonicRQSTransform,
    SoftclipTransform,
)

import jacobiflow as jf
from adapters.foreign_flows import CONTEXT, D, context_rows, perturb
from stand_ins import UMNNTransform


@pytest.mark.parametrize("context", [0, CONTEXT])
def test_umnn(context: int, sweeps: list[Any]) -> None:
    """Alone and in a mixed flow; its bisection ends at 40 / 2^25."""
    torch.manual_seed(0)
    flow = perturb(CompositeTransform([UMNNTransform(D, 24, context or None) for _ in range(2)]))
    z, c = torch.randn(8, D), context_rows(8, torch.float32) if context else None
    with torch.no_grad():
        x, log_det = flow.inverse(z, c)
        y, found = jf.accelerate(flow).inverse(z, c)
    assert len(sweeps) == 2
    torch.testing.assert_close(y, x, atol=5e-5, rtol=1e-5)
    torch.testing.assert_close(found, log_det, atol=5e-5, rtol=1e-5)


def composed(scale: Tensor, shift: Tensor, *spline: Tensor) -> Any:
    return ComposedTransform(MonotonicAffineTransform(scale, shift), MonotonicRQSTransform(*spline))


UNIVARIATES: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "composed": (composed, [(), (), (4,), (4,), (3,)]),
    "soft clip": (lambda s: ComposedTransform(SoftclipTransform(9.0), MonotonicAffineTransform(s, s)), [()]),
    "Bernstein": (zuko.transforms.BernsteinTransform, [(6,)]),
    "bounded Bernstein": (zuko.transforms.BoundedBernsteinTransform, [(6,)]),
    "sum of squares": (zuko.transforms.SOSPolynomialTransform, [(3, 4)]),
    "Gaussianization": (zuko.transforms.GaussianizationTransform, [(5,), (5,)]),
    "circular spline": (zuko.flows.spline.CircularRQSTransform, [(4,), (4,), (3,)]),
}


@pytest.mark.parametrize("name", UNIVARIATES)
def test_any_univariate_map_of_zuko(name: str, sweeps: list[Any]) -> None:
    univariate, shapes = UNIVARIATES[name]
    torch.manual_seed(0)
    lazy = MaskedAutoregressiveTransform(D, 3, univariate=univariate, shapes=shapes, hidden_features=(24,)).double()
    c, z = torch.randn(5, 3, dtype=torch.float64), torch.rand(5, D, dtype=torch.float64)
    with torch.no_grad():
        x, log_det = lazy(c).inv.call_and_ladj(z)
        y, found = jf.accelerate(lazy)(c).inv.call_and_ladj(z)
    assert len(sweeps) == 1
    torch.testing.assert_close(y, x, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(found, log_det, atol=2e-4, rtol=1e-5)


class Chain(nn.Module):
    """A meta function without masks: each feature sees the few before it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3) / 12)
        self.calls = 0

    def meta(self, x: Tensor) -> Any:
        self.calls += 1
        past = sum(
            w * torch.roll(x, i + 1, -1).index_fill(-1, torch.arange(i + 1), 0) for i, w in enumerate(self.weight)
        )
        return DependentTransform(MonotonicAffineTransform(past.sin(), past), 1)


@pytest.mark.parametrize("shape", [(40,), (6, 40), (2, 3, 40)], ids=str)
def test_any_meta_function(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    chain = Chain().double()
    transform, z = AutoregressiveTransform(chain.meta, passes=40), torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        x = transform.inv(z)
        jf.accelerate(transform)
        chain.calls = 0
        torch.testing.assert_close(transform.inv(z), x, atol=1e-10, rtol=1e-10)
    assert chain.calls < 30
    saved = 40 - chain.calls
    found = torch.autograd.grad(transform.inv(z).sum(), chain.weight)[0]
    (entry,) = jf.acceleration(transform).entries
    assert entry.why == "gradients through a `meta` of any kind"
    assert entry.calls == {"full sweeps": 1, "original": 1}
    assert (entry.rows, entry.passes_saved) == (z[..., 0].numel(), saved)
    jf.restore(transform)
    torch.testing.assert_close(found, torch.autograd.grad(transform.inv(z).sum(), chain.weight)[0])


def test_rows_without_a_finite_inverse_take_all_passes_of_a_meta_function() -> None:
    transform = AutoregressiveTransform(lambda x: MonotonicAffineTransform(x * 0, x * 0), passes=9)
    z = torch.tensor([[1.0, float("nan")], [2.0, 3.0]])
    assert torch.equal(jf.accelerate(transform).inv(z).isnan(), z.isnan())
