"""zuko: masked autoregressive transforms with any univariate map, and distributions made of them."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform
from zuko import transforms
from zuko.flows.autoregressive import MaskedAutoregressiveTransform
from zuko.nn import MaskedLinear, MaskedMLP, Residual
from zuko.utils import unpack

from jacobiflow.adapters.conditioner import runs_as
from jacobiflow.adapters.foreign import Foreign, Patch
from jacobiflow.adapters.masked import Link, Network, elementwise
from jacobiflow.core.bijectors import Bijector, Compiled, Spline
from jacobiflow.core.native import CLIPPED_SPLINE, SOFTCLIP


class Lazy(Patch):
    """`lazy(context)`, which makes a transform: the transform is accelerated on its way out."""

    method = "forward"
    owners = (MaskedAutoregressiveTransform,)

    def describe(self) -> Foreign | None:
        plain = MaskedAutoregressiveTransform
        if type(self.owner).forward is not plain.forward or type(self.owner).meta is not plain.meta:
            return None
        return describe(self.owner)

    def parts(self) -> Iterable[nn.Module]:
        return _parts(self.owner)

    def __call__(self, c: Tensor | None = None) -> Transform:
        transform: Transform = self.original()(c)
        patch = Inverse(transform, self.tol)
        patch.solver = self.shared()
        patch.install()
        return transform


class Inverse(Patch):
    """`transform._inverse(y)` of a transform with its context bound."""

    method = "_inverse"
    owners = (transforms.AutoregressiveTransform,)

    def describe(self) -> Foreign | None:
        meta = self.owner.meta
        lazy = getattr(getattr(meta, "func", None), "__self__", None)
        if not isinstance(lazy, MaskedAutoregressiveTransform) or meta.func != lazy.meta:
            return None
        return describe(lazy)

    def parts(self) -> Iterable[nn.Module]:
        return _parts(self.owner.meta.func.__self__)

    def __call__(self, y: Tensor) -> Tensor:
        (context,) = self.owner.meta.args
        shape = y.shape
        flat, rows = y.reshape(-1, shape[-1]), None
        if context is not None:
            batch = torch.broadcast_shapes(shape[:-1], context.shape[:-1])  # type: ignore[no-untyped-call]
            flat = y.expand(*batch, shape[-1]).reshape(-1, shape[-1])
            rows = context.reshape(-1, context.shape[-1])
            if len(rows) > 1:
                rows = context.expand(*batch, context.shape[-1]).reshape(-1, context.shape[-1])
            shape = torch.Size((*batch, shape[-1]))
        found = self.solved(flat, rows)
        return self.original()(y) if found is None else found[0].view(shape)


PATCHES = (Lazy, Inverse)


def describe(lazy: Any) -> Foreign | None:
    """None where the univariate map is a network that cannot be cut into features."""
    length = lazy.hyper.out_features // lazy.total
    bijector = _bijector(lazy, length)
    if bijector is None or not runs_as(lazy.hyper, MaskedMLP):
        return None
    network = _network(lazy.hyper, length)
    if network is None:
        return None
    return Foreign(
        length=length,
        passes=lazy.passes,
        module=lazy,
        contexts=(network.links[0].linear.in_features - length,),
        theta=lambda x, c: lazy.hyper(x if c is None else torch.cat((x, c), -1)).view(len(x), length, -1),
        bijector=bijector,
        network=network,
        indexed=isinstance(bijector, Univariate) and bijector.stack is not None,
        resolution=bijector.resolution if isinstance(bijector, Univariate) else 0.0,
        ours=not isinstance(bijector, Univariate),
    )


@dataclass(frozen=True)
class SoftclipAffine:
    """z = exp(softclip(a)) x + b, theta = (b, a): zuko's affine map; softclip bounds the slope."""

    slope: float = 1e-3
    params: int = 2

    @property
    def compiled(self) -> Compiled:
        """For the compiled functions."""
        return SOFTCLIP, (-1 / math.log(self.slope),)

    def _scale(self, a: Tensor) -> Tensor:
        return a / (1 + (a / math.log(self.slope)).abs())

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, a = theta.chunk(2, dim=-1)
        a = self._scale(a)
        return torch.addcmul(b, x, a.exp()), a

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, a = theta.chunk(2, dim=-1)
        a = self._scale(a)
        return (z - b) / a.exp(), -a


class SoftclipSpline(Spline):
    """zuko's rational-quadratic spline: soft-clipped parameters, slopes exponentiated."""

    @property
    def compiled(self) -> Compiled:
        return CLIPPED_SPLINE, (self.bins, self.bound, self.min_bin, -1 / math.log(self.min_slope))

    def _edges(self, raw: Tensor) -> Tensor:
        return super()._edges(raw / (1 + (raw * (2 / math.log(self.min_slope))).abs()))

    def _slopes(self, raw: Tensor) -> Tensor:
        return (raw / (1 + (raw / math.log(self.min_slope)).abs())).exp()


@dataclass(frozen=True)
class Univariate:
    """Any univariate map of zuko. The last number of theta is the feature if there is a network a feature."""

    make: Any  # of a Transform from its parameters
    shapes: tuple[torch.Size, ...]
    resolution: float  # of its inverse, if that is found by bisection
    stack: nn.Module | None  # `make`, if it is a network a feature

    @property
    def params(self) -> int:
        """Numbers a feature."""
        return sum(prod(s) for s in self.shapes)

    def _transform(self, theta: Tensor) -> Transform:
        make = self.make
        if self.stack is not None:
            make, theta = _sliced(self.stack, theta[0, :, -1].long()), theta[..., :-1]
        return make(*unpack(theta, self.shapes))  # type: ignore[no-any-return]

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        z, slope = self._transform(theta).call_and_ladj(x[..., 0])  # type: ignore[attr-defined]
        return z.unsqueeze(-1), slope.unsqueeze(-1)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        transform = self._transform(theta)
        x: Tensor = transform.inv(z[..., 0])
        with torch.no_grad():
            slope = -transform.call_and_ladj(x.detach())[1]  # type: ignore[attr-defined]
        if self.resolution:  # bisection has an absolute tolerance
            slope = slope.clamp_min(0)
        return x.unsqueeze(-1), slope.unsqueeze(-1)


def _bijector(lazy: Any, length: int) -> Bijector | None:
    """Our own map where the formulas agree."""
    make, shapes = lazy.univariate, tuple(torch.Size(s) for s in lazy.shapes)
    options: dict[str, Any] = {}
    if isinstance(make, functools.partial) and not make.args:
        options, make = make.keywords, make.func
    slope = options.get("slope", 1e-3)
    usual = 0 < slope < 1
    if make is transforms.MonotonicAffineTransform and set(options) <= {"slope"} and usual:
        return SoftclipAffine(slope)
    several = make is transforms.MonotonicRQSTransform and shapes[0][0] > 1
    if several and set(options) <= {"slope", "bound"} and usual:
        return SoftclipSpline(shapes[0][0], options.get("bound", 5.0), min_bin=0.0, min_slope=slope)
    stack = lazy.univariate if isinstance(lazy.univariate, nn.Module) else None
    if stack is not None and any(p.shape[:1] != (length,) for p in stack.parameters()):
        return None
    return Univariate(lazy.univariate, shapes, _resolution(lazy.univariate(*map(torch.zeros, shapes))), stack)


def _resolution(transform: Any) -> float:
    """The width of a bisection's last interval."""
    if isinstance(transform, transforms.ComposedTransform):
        return max(map(_resolution, transform.transforms))
    if isinstance(transform, transforms.MonotonicTransform):
        width = 2 * transform.bound
        return width / 2 ** math.ceil(math.log2(width / transform.eps))  # type: ignore[no-any-return]
    return 0.0


def _sliced(module: nn.Module, features: Tensor) -> nn.Module:
    """A network a feature, for these features only."""
    cut = copy.copy(module)
    cut.__dict__ = module.__dict__ | {
        "_parameters": {k: p if p is None else p[features] for k, p in module._parameters.items()},
        "_modules": {k: m if m is None else _sliced(m, features) for k, m in module._modules.items()},
    }
    return cut


def _parts(lazy: Any) -> Iterable[nn.Module]:
    """What computes parameters, and the univariate map if that has weights."""
    return (lazy.hyper, lazy.univariate) if isinstance(lazy.univariate, nn.Module) else (lazy.hyper,)


def _network(hyper: Any, length: int) -> Network | None:
    """The wiring of a MaskedMLP: linear maps with activations between, or residual blocks. None if it has
    linear maps that are not zuko's."""
    links: list[Link] = []
    kinds: dict[str, nn.Module] = {}
    active = False
    for layer in hyper:
        if runs_as(layer, MaskedLinear):
            links.append(Link(layer, len(links), active))
            active = False
        elif isinstance(layer, nn.Linear) or (isinstance(layer, Residual) and active):
            return None
        elif isinstance(layer, Residual):
            first, kind, second = layer
            if not runs_as(layer, Residual) or not all(runs_as(m, MaskedLinear) for m in (first, second)):
                return None
            kinds[repr(kind)] = kind
            links.append(Link(first, len(links), False))
            links.append(Link(second, len(links), skip=len(links) - 1))
        else:
            kinds[repr(layer)] = layer
            active = True
    activation = elementwise(next(iter(kinds.values()), None)) if len(kinds) == 1 else None
    if len(links) < 2:
        activation = None
    rows = torch.arange(links[-1].linear.out_features).view(length, -1)
    return Network(length, tuple(links), activation, rows)
