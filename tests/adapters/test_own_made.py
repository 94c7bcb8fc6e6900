"""A masked network of one's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jacobiflow as jf
from jacobiflow.core.bijectors import ExpAffine, Spline

T, H, C = 9, 27, 2


class MaskedLinear(nn.Linear):
    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


def masks(order: Tensor, context: int = 0, params: int = 2) -> list[Tensor]:
    """The masks of a MADE of one hidden layer, theta by feature."""
    degree = torch.cat((torch.argsort(order) + 1, torch.zeros(context, dtype=torch.long)))
    hidden = torch.arange(H) % T
    out = (torch.argsort(order) + 1).repeat_interleave(params)
    return [hidden[:, None] >= degree, out[:, None] > hidden]


class Net(nn.Module):
    def __init__(self, order: Tensor, context: int = 0, params: int = 2) -> None:
        super().__init__()
        self.first, self.last = (MaskedLinear(m) for m in masks(order, context, params))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = x if context is None else torch.cat((x, context), -1)
        return self.last(self.first(x).tanh()).view(len(x), T, -1)


class Cubic:
    """z = x + exp(a) x^3: a bijector whose inverse is found by Newton's method."""

    params = 1

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return x + theta.exp() * x**3, (1 + 3 * theta.exp() * x**2).log()

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        x = z.clone()
        for _ in range(60):
            x = x - (self.forward(x, theta)[0] - z) / (1 + 3 * theta.exp() * x**2)
        return x, -self.forward(x, theta)[1]


ORDER = torch.tensor([3, 1, 0, 2, 8, 5, 7, 4, 6])


def as_function(context: int = 0) -> jf.OwnMADE:
    """A lambda around a network without masks: full passes, in the natural order."""
    net = Net(torch.arange(T), context)
    return jf.OwnMADE(lambda x, c: net(x, c), ExpAffine(), T, context=context)


def masked_outside() -> jf.OwnMADE:
    """Plain linear layers whose masks the function applies."""
    start, end = (nn.Linear(m.shape[1], m.shape[0]) for m in masks(ORDER))
    inner, outer = masks(ORDER)

    def params(x: Tensor, context: Tensor | None) -> Tensor:
        hidden = torch.tanh(F.linear(x, start.weight * inner.to(x), start.bias))
        return F.linear(hidden, end.weight * outer.to(x), end.bias).view(len(x), T, 2)

    return jf.OwnMADE(params, ExpAffine(), T, masks=[(start, inner), (end, outer)], activation=torch.tanh)


GLOBAL_NET = Net(torch.arange(T))
KINDS: dict[str, tuple[Callable[[], jf.OwnMADE], int, str]] = {
    "a module": (lambda: jf.OwnMADE(Net(ORDER), ExpAffine(), T, activation=torch.tanh), 0, "C kernels"),
    "with context": (
        lambda: jf.OwnMADE(Net(ORDER, C), ExpAffine(), T, context=C, activation=torch.tanh),
        C,
        "C kernels",
    ),
    "a spline": (
        lambda: jf.OwnMADE(Net(ORDER, 0, 14), Spline(5, 3.0), T, activation=torch.tanh),
        0,
        "C kernels",
    ),
    "another bijector": (
        lambda: jf.OwnMADE(Net(ORDER, 0, 1), Cubic(), T, activation=torch.tanh),
        0,
        "cached sweeps",
    ),
    "no activation": (lambda: jf.OwnMADE(Net(ORDER), ExpAffine(), T), 0, "full sweeps"),
    "a function": (as_function, 0, "full sweeps"),
    "a function with context": (lambda: as_function(C), C, "full sweeps"),
    "a function with a global": (
        lambda: jf.OwnMADE(lambda x, c: GLOBAL_NET(x), ExpAffine(), T),
        0,
        "full sweeps",
    ),
    "masks apart": (masked_outside, 0, "C kernels"),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_inverse_is_that_of_one_pass_per_feature(name: str, sweeps: list[Any]) -> None:
    make, context, runs = KINDS[name]
    torch.manual_seed(0)
    model = make()
    c, z = torch.randn(6, context) if context else None, torch.randn(6, T)
    inputs = [z.requires_grad_(), *model.parameters()]
    expected = model.inverse(z, c)
    wanted = torch.autograd.grad(expected[0].square().sum() + expected[1].sum(), inputs, allow_unused=True)
    jf.accelerate(model)
    found = model.inverse(z, c)
    gradients = torch.autograd.grad(found[0].square().sum() + found[1].sum(), inputs, allow_unused=True)
    for a, b in zip((*found, *gradients), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)
    assert all(bool(g.any()) for g in wanted)
    x = model.sample(50, None if c is None else c[:1])
    back, _ = model.forward(x, None if c is None else c[:1].expand(50, -1))
    assert x.shape == (50, T)
    assert abs(back.std().item() - 1) < 0.15
    assert [e.runs for e in jf.acceleration(model).entries] == [runs]
    assert len(sweeps) == 2


@pytest.mark.parametrize("name", ["a module", "a function", "masks apart"])
def test_copies_have_weights_of_their_own(name: str, sweeps: list[Any]) -> None:
    torch.manual_seed(0)
    model, z = jf.accelerate(KINDS[name][0]()), torch.randn(4, T)
    with torch.no_grad():
        x = model.inverse(z)[0]
        twin = copy.deepcopy(model)
        for p in twin.parameters():
            p.mul_(1.5)
        other = twin.inverse(z)[0]
        assert torch.equal(model.inverse(z)[0], x)
        assert (other - x).abs().max() > 1e-3
        torch.testing.assert_close(jf.restore(twin).inverse(z)[0], other, atol=1e-5, rtol=1e-5)


def test_what_is_wrong_is_said() -> None:
    net = Net(ORDER)
    with pytest.raises(ValueError, match=r"a mask has shape \[2, 2\]: give it the shape \[27, 9\]"):
        jf.OwnMADE(net, ExpAffine(), T, masks=[(net.first, torch.ones(2, 2))])
    with pytest.raises(ValueError, match="masks has a layer that params does not hold"):
        jf.OwnMADE(Net(ORDER), ExpAffine(), T, masks=[(net.first, torch.ones(27, 9))])
    free = nn.Parameter(torch.ones(2))
    outside = jf.OwnMADE(lambda x, c: (0 * x[..., None] + free).cumsum(1), ExpAffine(), T)
    with pytest.raises(jf.AccelerationError, match="weights outside of modules: put them into a module"):
        jf.accelerate(outside)
    leaking = jf.OwnMADE(lambda x, c: torch.stack((x.flip(1), x), -1), ExpAffine(), T)
    with pytest.raises(jf.AccelerationError, match="depend on later features"):
        jf.accelerate(leaking)
