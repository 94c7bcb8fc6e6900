"""zuko: masked autoregressive transforms with any univariate map."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from jacobiflow.adapters.inverter import FULL, tolerance
from jacobiflow.adapters.maps import ForeignMap, SoftclipAffine, SoftclipSpline
from jacobiflow.adapters.masked import networks
from jacobiflow.adapters.patch import ORIGINAL, FactoryPatch, Patch, require_gain
from jacobiflow.adapters.transform_spec import Declined, Map, Theta, TransformSpec, frozen, parts, variant
from jacobiflow.adapters.walk import captured
from jacobiflow.core.bijectors import Bijector

ATTRIBUTES = {"univariate", "shapes", "total"}
LOG_DET = "log_abs_det_jacobian"
FIRST = torch.arange(1)  # a map that is the same for all features needs no others


class Inverse(Patch):
    """`transform._inverse(y)` of a transform whose context is bound."""

    method, batched = "_inverse", True
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
        kinds = {repr(m): m for m in module.hyper.modules() if not isinstance(m, nn.Linear | nn.Sequential)}
        activation = next(iter(kinds.values())) if len(kinds) == 1 else None
        linears = (layer for layer in module.hyper if isinstance(layer, nn.Linear | nn.Sequential))
        candidates = networks(linears, activation, lambda r: r.view(-1, module.total))
        length = candidates[0].length

        def twin(theta: Theta, width: int) -> tuple[Map, Map]:
            small = _part(module, theta, torch.arange(width))
            made = variant(self.owner, meta=functools.partial(small.meta, None), passes=width)

            def inverse(z: Tensor) -> tuple[Tensor, Tensor]:
                x = type(made)._inverse(made, z)
                return x, -made.call_and_ladj(x)[1]

            return made.call_and_ladj, inverse

        shapes = [tuple(s) for s in module.shapes]
        return TransformSpec(
            module=module,
            passes=module.passes,
            context=candidates[0].links[0].linear.in_features - length,
            theta=lambda x, c: module.hyper(x if c is None else torch.cat((x, c), -1)).view(len(x), length, -1),
            maps=tuple(_maps(module, shapes, length)),
            networks=candidates,
            twin=twin,
            options=shapes,
            resolution=_resolution(module.univariate(*map(torch.zeros, shapes))),
        )

    def remove(self) -> None:
        super().remove()
        vars(self.owner).pop(LOG_DET, None)

    def __call__(self, y: Tensor) -> Tensor:
        (context,) = self.owner.meta.args
        self.solution = self.solved(y, context)
        if self.solution is None:
            return self.original()(y)  # type: ignore[no-any-return]
        setattr(self.owner, LOG_DET, self.log_det)
        return self.solution[0]

    def log_det(self, x: Tensor, y: Tensor) -> Tensor:
        """`transform.log_abs_det_jacobian(x, y)`, which is known if x was just solved for."""
        known = self.solution
        if known is None or known[0] is not x or self.inverter().spec.resolution:
            return getattr(type(self.owner), LOG_DET)(self.owner, x, y)  # type: ignore[no-any-return]
        self.solution = None
        return -known[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "solution": None}


class ForwardPatch(FactoryPatch):
    """`lazy(context)`, which returns a transform."""

    method, made = "forward", Inverse

    @classmethod
    def matches(cls, item: Any) -> bool:
        known = parts(item)
        phi, hyper = known.get("phi"), known.get("hyper")
        if not known.keys() >= ATTRIBUTES:
            return False
        if hasattr(type(item), "meta"):
            return isinstance(hyper, nn.Sequential) and "passes" in known
        if isinstance(phi, nn.ParameterList):  # an elementwise transform of one feature
            return all(p.shape[:1] == (1,) for p in phi)
        return isinstance(hyper, nn.Sequential) and getattr(hyper[-1], "out_features", 0) == known["total"]

    def make(self, module: Any) -> Transform:
        if not hasattr(module, "passes"):
            require_gain(1)
        return type(module).forward(module)  # type: ignore[no-any-return]


class OpenInverse(Patch):
    """`transform._inverse(y)` with any `meta` function: the original's passes, until nothing changes any more."""

    method = "_inverse"

    @classmethod
    def matches(cls, item: Any) -> bool:
        known = vars(item) if isinstance(item, Transform) else {}
        return callable(known.get("meta")) and type(known.get("passes")) is int and not Inverse.matches(item)

    @functools.cached_property
    def module(self) -> nn.Module:
        return nn.ModuleList(captured(self.owner.meta))

    def spec(self) -> Any:
        require_gain(self.owner.passes)

    def now(self, y: Tensor | None = None) -> tuple[str, str]:
        given = [t for t in (y, *self.module.parameters()) if t is not None]
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            return ORIGINAL, "gradients through a `meta` of any kind"
        try:
            self.spec()
            self.state().check(given[0].device if given else torch.device("cpu"))
        except Declined as reason:
            return ORIGINAL, str(reason)
        return FULL, "its `meta` is unknown: each sweep is a full pass"

    def __call__(self, y: Tensor) -> Tensor:
        runs, why = self.now(y)
        if runs == ORIGINAL:
            self.tally.count(ORIGINAL, why)
            return self.original()(y)  # type: ignore[no-any-return]
        x, tol, left = torch.zeros_like(y), tolerance(self.tol, y.dtype, False, 0.0), self.owner.passes
        while left:
            left -= 1
            before, x = x, self.owner.meta(x).inv(y)
            scale = torch.maximum(x.abs(), x.abs().reshape(-1, x.shape[-1]).mean(0))
            if x.shape == before.shape and bool(((x - before).abs() <= tol * scale).all()):
                break
        self.tally.count(FULL, rows=x[..., 0].numel(), saved=left)
        return x


def _maps(lazy: Any, shapes: list[tuple[int, ...]], length: int) -> Iterator[Bijector]:
    """Maps of ours that may have the same formula, then the transform's own."""
    make = lazy.univariate
    options = make.keywords if isinstance(make, functools.partial) else {}
    slope, bins = options.get("slope", 1e-3), shapes[0][0] if shapes[0] else 0
    if shapes == [(), ()] and 0 < slope < 1:
        yield SoftclipAffine(slope)
    if bins > 1 and shapes == [(bins,), (bins,), (bins - 1,)] and 0 < slope < 1:
        yield SoftclipSpline(bins, options.get("bound", 5.0), min_bin=0.0, min_slope=slope)
    stack = isinstance(make, nn.Module)  # a network per feature
    if stack and any(p.shape[:1] != (length,) for p in make.parameters()):
        raise Declined("its features share the network of its univariate map")
    yield ForeignMap(functools.partial(_own_map, lazy), features=length if stack else 0)


def _own_map(lazy: Any, value: Tensor, theta: Tensor, inverse: bool, features: Any = FIRST) -> tuple[Tensor, Tensor]:
    """The transform's own univariate map, of these features."""
    transform = _part(lazy, lambda x: theta, features).meta(None, value).base
    if not inverse:
        return transform.call_and_ladj(value)  # type: ignore[no-any-return]
    x: Tensor = transform.inv(value)
    if not _resolution(transform):
        return x, -transform.call_and_ladj(x)[1]
    with torch.no_grad():  # absolute, so that the unit |z dx/dz| of relative changes is at least 1
        return x, torch.maximum(-transform.call_and_ladj(x.detach())[1], -value.abs().clamp_min(1e-30).log())


def _part(lazy: Any, theta: Theta, features: Tensor) -> Any:
    """The lazy transform of these features only, with given parameters instead of a network."""
    univariate = lazy.univariate
    if isinstance(univariate, nn.Module):
        univariate = frozen(univariate, lambda m, name, value: value[features] if name in m._parameters else value)
    return variant(lazy, hyper=lambda x: theta(x).flatten(-2), univariate=univariate, passes=len(features))


def _resolution(transform: Any) -> float:
    """The width of the last interval of a bisection; 0 for closed forms."""
    if parts := getattr(transform, "transforms", None):
        return max(map(_resolution, parts))
    if hasattr(transform, "bound") and hasattr(transform, "eps"):
        width = 2 * transform.bound
        return width / 2 ** math.ceil(math.log2(width / transform.eps))  # type: ignore[no-any-return]
    return 0.0
