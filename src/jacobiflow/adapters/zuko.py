"""zuko: masked autoregressive transforms with any univariate map."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from jacobiflow.adapters.inverter import FULL, tolerance
from jacobiflow.adapters.maps import SoftclipAffine, SoftclipSpline
from jacobiflow.adapters.masked import ForeignNetwork, Link, elementwise, is_masked_linear
from jacobiflow.adapters.module_state import State, only_original
from jacobiflow.adapters.patch import FEW_PASSES, Call, Patch
from jacobiflow.adapters.race import ORIGINAL
from jacobiflow.adapters.transform_spec import (
    Declined,
    ForeignMap,
    Map,
    NothingToGain,
    Theta,
    TransformSpec,
    parts,
    variant,
)
from jacobiflow.adapters.walk import captured
from jacobiflow.core.bijectors import Bijector

ATTRIBUTES = {"univariate", "shapes", "total", "passes"}


class ForwardPatch(Patch):
    """`lazy(context)`, which returns a transform: that one is accelerated."""

    method = "forward"

    @classmethod
    def matches(cls, item: Any) -> bool:
        known = parts(item)
        if not hasattr(type(item), "meta"):
            return _one_feature(known)
        return isinstance(known.get("hyper"), nn.Sequential) and set(known) >= ATTRIBUTES

    def describe(self, module: Any) -> TransformSpec:
        if not hasattr(module, "passes"):
            raise NothingToGain("its own inverse takes 1 passes")
        return describe(module, lambda lazy: type(lazy).forward(lazy))

    def __call__(self, c: Tensor | None = None) -> Transform:
        return self.pass_on(self.original()(c), Inverse)  # type: ignore[no-any-return]


def _one_feature(known: dict[str, Any]) -> bool:
    """Whether these are the attributes of an elementwise transform of one feature."""
    if not set(known) >= {"univariate", "shapes", "total"}:
        return False
    if isinstance(known.get("phi"), nn.ParameterList):
        return all(p.shape[:1] == (1,) for p in known["phi"])
    hyper = known.get("hyper")
    return isinstance(hyper, nn.Sequential) and getattr(hyper[-1], "out_features", 0) == known["total"]


class Inverse(Patch):
    """`transform._inverse(y)` of a transform whose context is bound."""

    method = "_inverse"
    solution: tuple[Tensor, Tensor] | None = None  # the last one, until its log-determinant is asked for

    @classmethod
    def matches(cls, item: Any) -> bool:
        meta = vars(item).get("meta") if isinstance(item, Transform) else None
        lazy = getattr(getattr(meta, "func", None), "__self__", None)
        return ForwardPatch.matches(lazy) and meta.func == lazy.meta  # type: ignore[union-attr]

    @property
    def module(self) -> nn.Module:
        return self.owner.meta.func.__self__  # type: ignore[no-any-return]

    def describe(self, module: Any) -> TransformSpec:
        def transform(lazy: Any) -> Any:
            made = variant(self.owner, meta=functools.partial(lazy.meta, None), passes=lazy.passes)
            for name in (self.method, LogDet.method):
                vars(made).pop(name, None)
            return made

        return describe(module, transform)

    def install(self) -> None:
        super().install()
        LogDet(self.owner, self.tol, self.tally).install()

    def __call__(self, y: Tensor) -> Tensor:
        (context,) = self.owner.meta.args
        self.solution = self.solved_batch(Call(y, context, self.original()))
        return self.original()(y) if self.solution is None else self.solution[0]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "solution": None}


class LogDet(Patch):
    """`transform.log_abs_det_jacobian(x, y)`, which is known if x was just solved for."""

    method = "log_abs_det_jacobian"

    @classmethod
    def matches(cls, item: Any) -> bool:
        return False  # it comes with the inverse

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        inverse = vars(self.owner).get(Inverse.method)
        known = inverse.solution if isinstance(inverse, Inverse) else None
        if known is None or known[0] is not x or inverse.inverter().spec.resolution:
            return self.original()(x, y)  # type: ignore[no-any-return]
        inverse.solution = None
        return -known[1]


class OpenInverse(Patch):
    """`transform._inverse(y)` of an autoregressive transform with any `meta` function: the original's passes,
    until nothing changes any more."""

    method = "_inverse"

    @classmethod
    def matches(cls, item: Any) -> bool:
        known = vars(item) if isinstance(item, Transform) else {}
        return callable(known.get("meta")) and type(known.get("passes")) is int and not Inverse.matches(item)

    @functools.cached_property
    def _modules(self) -> nn.ModuleList:
        return nn.ModuleList(captured(self.owner.meta))

    @property
    def module(self) -> nn.Module:
        return self._modules

    def inverter(self) -> Any:
        if self.owner.passes <= FEW_PASSES:
            raise NothingToGain(f"its own inverse takes {self.owner.passes} passes")

    def now(self) -> tuple[str, str]:
        obstacle = self._obstacle(next(self.module.parameters(), torch.zeros(())))
        return (
            (ORIGINAL, obstacle) if obstacle else (FULL, "its `meta` is unknown: each sweep is a full pass")
        )

    def _obstacle(self, y: Tensor) -> str | None:
        if self.owner.passes <= FEW_PASSES:
            return f"its own inverse takes {self.owner.passes} passes"
        if torch.is_grad_enabled() and any(t.requires_grad for t in (y, *self.module.parameters())):
            return "gradients through a `meta` of any kind"
        return only_original(y.device) or State((self.module,)).obstacle

    def __call__(self, y: Tensor) -> Tensor:
        if obstacle := self._obstacle(y):
            self.tally.count(ORIGINAL, obstacle)
            return self.original()(y)  # type: ignore[no-any-return]
        x, tol = torch.zeros_like(y), tolerance(self.tol, y.dtype, False, 0.0)
        left = self.owner.passes
        while left:
            left -= 1
            before, x = x, self.owner.meta(x).inv(y)
            size = x.abs()
            scale = torch.maximum(size, size.flatten(0, -2).mean(0)) if x.ndim > 1 else size
            if x.shape == before.shape and bool(((x - before).abs() <= tol * scale).all()):
                break
        self.tally.count(FULL, rows=x[..., 0].numel(), saved=left)
        return x


def describe(lazy: Any, transform: Callable[[Any], Any]) -> TransformSpec:
    """The description of a lazy transform; transform(lazy) is the transform without context that it makes."""
    network = _network(lazy)
    length = network.length

    def twin(theta: Theta, width: int) -> tuple[Map, Map]:
        made = transform(_part(lazy, theta, torch.arange(width)))

        def inverse(z: Tensor) -> tuple[Tensor, Tensor]:
            x = made._inverse(z)
            return x, -made.call_and_ladj(x)[1]

        return made.call_and_ladj, inverse

    return TransformSpec(
        length=length,
        passes=lazy.passes,
        module=lazy,
        contexts=(network.links[0].linear.in_features - length,),
        theta=lambda x, c: lazy.hyper(x if c is None else torch.cat((x, c), -1)).view(len(x), length, -1),
        maps=tuple(_maps(lazy, length)),
        networks=(network,),
        twin=twin,
        options=(id(lazy.univariate), [tuple(s) for s in lazy.shapes]),
    )


# The univariate map


def _maps(lazy: Any, length: int) -> Iterator[Bijector]:
    """Maps of ours that may have the same formula, then the transform's own."""
    make, shapes = lazy.univariate, [tuple(s) for s in lazy.shapes]
    options = make.keywords if isinstance(make, functools.partial) else {}
    slope, bound = options.get("slope", 1e-3), options.get("bound", 5.0)
    if shapes == [(), ()] and 0 < slope < 1:
        yield SoftclipAffine(slope)
    bins = shapes[0][0] if shapes[0] else 0
    if bins > 1 and shapes == [(bins,), (bins,), (bins - 1,)] and 0 < slope < 1:
        yield SoftclipSpline(bins, bound, min_bin=0.0, min_slope=slope)
    stack = isinstance(make, nn.Module)  # a network per feature
    if stack and any(p.shape[:1] != (length,) for p in make.parameters()):
        raise Declined("its features share the network of its univariate map")
    resolution = _resolution(make(*map(torch.zeros, shapes)))
    yield ForeignMap(_own_map(lazy, resolution), features=length if stack else 0, resolution=resolution)


def _own_map(lazy: Any, resolution: float) -> Callable[..., tuple[Tensor, Tensor]]:
    """The transform's own univariate map."""
    first = torch.arange(1)

    def function(
        value: Tensor, theta: Tensor, inverse: bool, features: Tensor = first
    ) -> tuple[Tensor, Tensor]:
        transform = _part(lazy, lambda x: theta, features).meta(None, value).base
        if not inverse:
            return transform.call_and_ladj(value)  # type: ignore[no-any-return]
        x: Tensor = transform.inv(value)
        if not resolution:
            return x, -transform.call_and_ladj(x)[1]
        with torch.no_grad():  # absolute, so that the unit |z dx/dz| of relative changes is at least 1
            log_slope = -transform.call_and_ladj(x.detach())[1]
            return x, torch.maximum(log_slope, -value.abs().clamp_min(1e-30).log())

    return function


def _part(lazy: Any, theta: Theta, features: Tensor) -> Any:
    """The lazy transform of these features only, with given parameters instead of a network."""
    univariate = lazy.univariate
    if isinstance(univariate, nn.Module):
        univariate = _sliced(univariate, features)
    return variant(lazy, hyper=lambda x: theta(x).flatten(-2), univariate=univariate, passes=len(features))


def _resolution(transform: Any) -> float:
    """The width of the last interval of a bisection; 0 for closed forms."""
    if parts := getattr(transform, "transforms", None):
        return max(map(_resolution, parts))
    if hasattr(transform, "bound") and hasattr(transform, "eps"):
        width = 2 * transform.bound
        return width / 2 ** math.ceil(math.log2(width / transform.eps))  # type: ignore[no-any-return]
    return 0.0


def _sliced(module: nn.Module, features: Tensor) -> nn.Module:
    """Of a module with a network per feature, the networks of these features."""
    parameters = {k: p if p is None else p[features] for k, p in module._parameters.items()}
    modules = {k: m if m is None else _sliced(m, features) for k, m in module._modules.items()}
    return variant(module, _parameters=parameters, _modules=modules)  # type: ignore[no-any-return]


# The network


def _network(lazy: Any) -> ForeignNetwork:
    """The layers of a masked MLP: linear layers with activations between, or residual blocks."""
    links: list[Link] = []
    activations: dict[str, nn.Module] = {}
    active = False
    for layer in lazy.hyper:
        residual = isinstance(layer, nn.Sequential) and len(layer) == 3
        if is_masked_linear(layer):
            links.append(Link(layer, len(links), active))
            active = False
        elif residual and is_masked_linear(layer[0]) and is_masked_linear(layer[2]) and not active:
            activations[repr(layer[1])] = layer[1]
            links.append(Link(layer[0], len(links), False))
            links.append(Link(layer[2], len(links), skip=len(links) - 1))
        elif isinstance(layer, nn.Linear | nn.Sequential):
            raise Declined(f"its {type(layer).__name__} is not a masked layer as in zuko")
        else:
            activations[repr(layer)] = layer
            active = True
    packable = len(activations) == 1 and len(links) > 1
    activation = elementwise(next(iter(activations.values()))) if packable else None
    rows = torch.arange(links[-1].linear.out_features).view(-1, lazy.total)
    return ForeignNetwork(len(rows), tuple(links), activation, rows)
