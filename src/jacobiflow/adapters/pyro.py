"""Pyro: affine and spline autoregressive transforms, conditional ones too."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from pyro.distributions import transforms
from pyro.distributions.transforms.spline import _monotonic_rational_spline
from pyro.nn import AutoRegressiveNN, ConditionalAutoRegressiveNN
from pyro.nn.auto_reg_nn import MaskedLinear
from torch import Tensor, nn

from jacobiflow.adapters.masked import ForeignNetwork, Link, elementwise
from jacobiflow.adapters.module_state import runs_as
from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.transform_spec import ForeignMap, TransformSpec
from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.description import Formula


class Inverse(Patch):
    """`transform._inverse(y)`. The transform caches the log-determinant at the returned point."""

    method = "_inverse"
    owners = (transforms.AffineAutoregressive, transforms.SplineAutoregressive)

    def describe(self) -> TransformSpec | None:
        net, _ = _bound(self.owner.arn)
        plain = next(kind for kind in self.owners if isinstance(self.owner, kind))
        changed = any(getattr(type(self.owner), m) is not getattr(plain, m) for m in ("_call", "_inverse"))
        if changed or not runs_as(net, AutoRegressiveNN, ConditionalAutoRegressiveNN):
            return None
        layers = (*net.layers, *(() if net.skip_layer is None else (net.skip_layer,)))
        if not all(runs_as(layer, MaskedLinear) for layer in layers):
            return None
        return describe(self.owner, net)

    def parts(self) -> Iterable[nn.Module]:
        return (_bound(self.owner.arn)[0],)

    def __call__(self, y: Tensor) -> Tensor:
        _, context = _bound(self.owner.arn)
        flat = y.reshape(-1, y.shape[-1])
        if context is not None:
            rows = context.reshape(-1, context.shape[-1])
            if len(rows) > 1 and context.ndim <= y.ndim:
                rows = context.expand(*y.shape[:-1], -1).reshape(-1, context.shape[-1])
            context = rows
        found = self.solved(flat, context)
        if found is None:
            return self.original()(y)  # type: ignore[no-any-return]
        x = found[0].view(y.shape)
        self.owner._call(x)
        return x


class Condition(Patch):
    """`transform.condition(context)`, which returns a transform: that one is accelerated."""

    method = "condition"
    owners = (transforms.ConditionalAffineAutoregressive, transforms.ConditionalSplineAutoregressive)

    def describe(self) -> TransformSpec | None:
        plain = next(kind for kind in self.owners if isinstance(self.owner, kind))
        if type(self.owner).condition is not plain.condition:
            return None
        return Inverse(self.original()(torch.zeros(self.owner.nn.context_dim)), 0.0).describe()

    def __call__(self, context: Tensor) -> Any:
        return self.pass_on(self.original()(context), Inverse)


PATCHES = (Inverse, Condition)


def _bound(arn: Any) -> tuple[Any, Tensor | None]:
    """A network and the context that is bound to it."""
    if isinstance(arn, functools.partial):
        return arn.func, arn.keywords["context"]
    return arn, None


def describe(owner: Any, net: Any) -> TransformSpec:
    """The description of a transform. `net` returns [n, P, features], theta is [n, features, P]."""

    def theta(x: Tensor, context: Tensor | None) -> Tensor:
        raw = net(x) if context is None else net(x, context)
        parts = [p.unsqueeze(-2) if p.ndim == x.ndim else p for p in raw]
        return torch.cat(parts, -2).transpose(-1, -2)

    bijector: Bijector
    if isinstance(owner, transforms.SplineAutoregressive):
        bijector = ForeignMap(functools.partial(_spline, owner.spline))
    elif owner.stable:
        bijector = StableAffine(owner.sigmoid_bias)
    else:
        bijector = ClampedAffine(owner.log_scale_min_clip, owner.log_scale_max_clip)
    return TransformSpec(
        length=net.input_dim,
        passes=net.input_dim,
        module=net,
        contexts=(net.context_dim,),
        theta=theta,
        bijector=bijector,
        network=_network(net),
    )


@dataclass(frozen=True)
class ClampedAffine:
    """z = exp(a) x + b, theta = (b, a). The value of a is clamped, its gradient is not."""

    low: float
    high: float
    params: int = 2

    def describe(self) -> Formula:
        return Formula("clamped", (self.low, self.high))

    def _split(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, a = theta.chunk(2, dim=-1)
        return b, a + (a.clamp(self.low, self.high) - a).detach()

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, a = self._split(theta)
        return torch.addcmul(b, x, a.exp()), a

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, a = self._split(theta)
        return (z - b) * torch.exp(-a), -a


@dataclass(frozen=True)
class StableAffine:
    """z = s x + (1 - s) b, s = sigmoid(u + bias), theta = (b, u)."""

    bias: float
    params: int = 2

    def describe(self) -> Formula:
        return Formula("stable", (self.bias,))

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, u = theta.chunk(2, dim=-1)
        return torch.lerp(b, x, torch.sigmoid(u + self.bias)), F.logsigmoid(u + self.bias)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, u = theta.chunk(2, dim=-1)
        stretch = 1 + torch.exp(-u - self.bias)
        return stretch * z + (1 - stretch) * b, stretch.log()


def _spline(about: Any, z: Tensor, theta: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
    """Pyro's rational spline, linear or quadratic, of unconstrained parameters."""
    k = about.count_bins
    w, h, d, *rest = theta.tensor_split((k, 2 * k, 3 * k - 1) if about.order == "linear" else (k, 2 * k), -1)
    lambdas = torch.sigmoid(rest[0]) if rest else None
    parts = (w.softmax(-1), h.softmax(-1), F.softplus(d), lambdas)
    return _monotonic_rational_spline(z, *parts, inverse=inverse, bound=about.bound)  # type: ignore[no-any-return]


def _network(net: Any) -> ForeignNetwork:
    """Linear maps with activations between. With a skip from input to output they cannot be packed, but give
    the right order."""
    links = [Link(layer, i, i > 0) for i, layer in enumerate(net.layers)]
    rows = torch.arange(links[-1].linear.out_features).view(-1, net.input_dim).T
    activation = elementwise(net.f) if net.skip_layer is None else None
    return ForeignNetwork(net.input_dim, tuple(links), activation, rows, first=net.context_dim)
