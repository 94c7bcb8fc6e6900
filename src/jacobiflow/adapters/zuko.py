"""zuko: masked autoregressive transforms with any univariate map."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform
from zuko import transforms
from zuko.flows.autoregressive import MaskedAutoregressiveTransform
from zuko.nn import MaskedLinear, MaskedMLP, Residual
from zuko.utils import unpack

from jacobiflow.adapters.masked import ForeignNetwork, Link, elementwise
from jacobiflow.adapters.module_state import runs_as
from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.transform_spec import ForeignMap, TransformSpec
from jacobiflow.core.bijectors import Bijector, Spline
from jacobiflow.core.description import Formula


class ForwardPatch(Patch):
    """`lazy(context)`, which returns a transform: that one is accelerated."""

    method = "forward"
    owners = (MaskedAutoregressiveTransform,)

    def describe(self) -> TransformSpec | None:
        plain = MaskedAutoregressiveTransform
        if type(self.owner).forward is not plain.forward or type(self.owner).meta is not plain.meta:
            return None
        return describe(self.owner)

    def parts(self) -> Iterable[nn.Module]:
        return _parts(self.owner)

    def __call__(self, c: Tensor | None = None) -> Transform:
        return self.pass_on(self.original()(c), Inverse)  # type: ignore[no-any-return]


class Inverse(Patch):
    """`transform._inverse(y)` of a transform whose context is bound."""

    method = "_inverse"
    owners = (transforms.AutoregressiveTransform,)

    def describe(self) -> TransformSpec | None:
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


PATCHES = (ForwardPatch, Inverse)


def describe(lazy: Any) -> TransformSpec | None:
    """The description of a transform; None if its univariate map is a network that features share."""
    length = lazy.hyper.out_features // lazy.total
    bijector = _bijector(lazy, length)
    if bijector is None or not runs_as(lazy.hyper, MaskedMLP):
        return None
    network = _network(lazy.hyper, length)
    if network is None:
        return None
    return TransformSpec(
        length=length,
        passes=lazy.passes,
        module=lazy,
        contexts=(network.links[0].linear.in_features - length,),
        theta=lambda x, c: lazy.hyper(x if c is None else torch.cat((x, c), -1)).view(len(x), length, -1),
        bijector=bijector,
        network=network,
    )


@dataclass(frozen=True)
class SoftclipAffine:
    """z = exp(softclip(a)) x + b, theta = (b, a): zuko's affine map; softclip bounds the slope."""

    slope: float = 1e-3
    params: int = 2

    def describe(self) -> Formula:
        return Formula("softclip", (-1 / math.log(self.slope),))

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

    def describe(self) -> Formula:
        strength = -1 / math.log(self.min_slope)
        return Formula("clipped_spline", (self.bins, self.bound, self.min_bin, strength))

    def _edges(self, raw: Tensor) -> Tensor:
        return super()._edges(raw / (1 + (raw * (2 / math.log(self.min_slope))).abs()))

    def _slopes(self, raw: Tensor) -> Tensor:
        return (raw / (1 + (raw / math.log(self.min_slope)).abs())).exp()


def _univariate(
    make: Any,
    shapes: tuple[torch.Size, ...],
    resolution: float,
    value: Tensor,
    theta: Tensor,
    inverse: bool,
    features: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Any univariate map of zuko. `make` returns it, given its parameters.

    features: given if `make` is a module with a network per feature.
    """
    make = make if features is None else _sliced(make, features)
    transform = make(*unpack(theta, shapes))
    if not inverse:
        return transform.call_and_ladj(value)  # type: ignore[no-any-return]
    x: Tensor = transform.inv(value)
    with torch.no_grad():
        log_slope = -transform.call_and_ladj(x.detach())[1]
        if resolution:  # absolute, so that the unit |z dx/dz| of relative changes is at least 1
            log_slope = torch.maximum(log_slope, -value.abs().clamp_min(1e-30).log())
    return x, log_slope


def _bijector(lazy: Any, length: int) -> Bijector | None:
    """Our own map where it has the same formula, else zuko's. None as in `describe`."""
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
    resolution = _resolution(lazy.univariate(*map(torch.zeros, shapes)))
    function = functools.partial(_univariate, lazy.univariate, shapes, resolution)
    return ForeignMap(function, features=0 if stack is None else length, resolution=resolution)


def _resolution(transform: Any) -> float:
    """The width of the last interval of a bisection; 0 for closed forms."""
    if isinstance(transform, transforms.ComposedTransform):
        return max(map(_resolution, transform.transforms))
    if isinstance(transform, transforms.MonotonicTransform):
        width = 2 * transform.bound
        return width / 2 ** math.ceil(math.log2(width / transform.eps))  # type: ignore[no-any-return]
    return 0.0


def _sliced(module: nn.Module, features: Tensor) -> nn.Module:
    """Of a module with a network per feature, the networks of these features."""
    cut = copy.copy(module)
    cut.__dict__ = module.__dict__ | {
        "_parameters": {k: p if p is None else p[features] for k, p in module._parameters.items()},
        "_modules": {k: m if m is None else _sliced(m, features) for k, m in module._modules.items()},
    }
    return cut


def _parts(lazy: Any) -> Iterable[nn.Module]:
    """The modules with weights: the network and, if it has any, the univariate map."""
    return (lazy.hyper, lazy.univariate) if isinstance(lazy.univariate, nn.Module) else (lazy.hyper,)


def _network(hyper: Any, length: int) -> ForeignNetwork | None:
    """The layers of a MaskedMLP: linear maps with activations between, or residual blocks. None if a linear
    map is not of zuko's class."""
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
    return ForeignNetwork(length, tuple(links), activation, rows)
