"""Pyro: affine and spline autoregressive transforms, conditional ones too."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from jacobiflow.adapters.maps import ClampedAffine, StableAffine, own_map
from jacobiflow.adapters.masked import networks
from jacobiflow.adapters.patch import FactoryPatch, Patch
from jacobiflow.adapters.transform_spec import Map, Theta, TransformSpec, parts, variant
from jacobiflow.core.bijectors import Bijector

NETWORK = {"layers", "skip_layer", "f", "input_dim", "context_dim", "param_dims"}
AFFINE = {"stable", "sigmoid_bias", "log_scale_min_clip", "log_scale_max_clip"}
SPLINE = {"count_bins", "bound", "order"}
KEPT = ("_cached_log_scale", "_cache_log_detJ")  # of affine maps and splines: `log_abs_det_jacobian` adds them up


class Inverse(Patch):
    """`transform._inverse(y)`. The transform keeps the log-determinant until it is asked for."""

    method, whole, batched = "_inverse", True, True

    @classmethod
    def matches(cls, item: Any) -> bool:
        known = parts(item)
        if not isinstance(item, Transform) or "arn" not in known:
            return False
        is_map = set(known) >= AFFINE or set(parts(known.get("spline"))) >= SPLINE
        return is_map and set(parts(_bound(item)[0])) >= NETWORK

    @property
    def module(self) -> nn.Module:
        return _bound(self.owner)[0]  # type: ignore[no-any-return]

    def describe(self, net: Any) -> TransformSpec:
        owner, activation = self.owner, net.f if net.skip_layer is None else None  # a skip leaves only the order right
        if "spline" in owner._modules:
            bijector: Bijector = own_map(self._twin)
        elif owner.stable:
            bijector = StableAffine(owner.sigmoid_bias)
        else:
            bijector = ClampedAffine(owner.log_scale_min_clip, owner.log_scale_max_clip)

        def theta(x: Tensor, context: Tensor | None) -> Tensor:
            raw = net(x) if context is None else net(x, context)  # [n, T] or [n, P_i, T] per kind of parameter
            return torch.cat([p.unsqueeze(-2) if p.ndim == x.ndim else p for p in raw], -2).transpose(-1, -2)

        return TransformSpec(
            module=net,
            passes=net.input_dim,
            context=net.context_dim,
            theta=theta,
            maps=(bijector,),
            networks=networks(net.layers, activation, lambda r: r.view(-1, net.input_dim).T, first=net.context_dim),
            twin=self._twin,
            options=[(k, v) for k, v in vars(owner).items() if k in AFFINE],
        )

    def _twin(self, theta: Theta, width: int) -> tuple[Map, Map]:
        dims, kept = _bound(self.owner)[0].param_dims, KEPT["spline" in self.owner._modules]

        def arn(x: Tensor) -> tuple[Tensor, ...]:
            kinds = torch.split(theta(x).transpose(-1, -2), dims, -2)
            return tuple(p.squeeze(-2) for p in kinds) if set(dims) == {1} else kinds

        arn.permutation = range(width)  # type: ignore[attr-defined]
        small, inverse = variant(self.owner, arn=arn), self.original().__func__  # type: ignore[attr-defined]
        if "spline" in self.owner._modules:
            vars(small)["spline"] = variant(self.owner.spline, nn=arn, input_dim=width)

        def log_det() -> Tensor:
            return vars(small)[kept].sum(-1)  # type: ignore[no-any-return]

        return lambda x: (small._call(x), log_det()), lambda z: (inverse(small, z), -log_det())

    def __call__(self, y: Tensor) -> Tensor:
        solution = self.solved(y, _bound(self.owner)[1])
        if solution is None or solution[0].shape != y.shape:
            return self.original()(y)  # type: ignore[no-any-return]
        # Not by a forward pass: where the map is steep, rounding of x would spoil the log-determinant.
        setattr(self.owner, KEPT["spline" in self.owner._modules], -solution[1].unsqueeze(-1))
        return solution[0]


class Condition(FactoryPatch):
    """`transform.condition(context)`, which returns a transform."""

    method, whole, made = "condition", True, Inverse

    @classmethod
    def matches(cls, item: Any) -> bool:
        known = parts(item)
        return set(parts(known.get("nn"))) >= NETWORK and not set(known) >= SPLINE

    @property
    def module(self) -> nn.Module:
        return self.owner.nn  # type: ignore[no-any-return]

    def make(self, module: Any) -> Any:
        return self.original()(torch.zeros(module.context_dim))


def _bound(owner: Any) -> tuple[Any, Tensor | None]:
    """The network of a transform and the context that is bound to it."""
    bound = isinstance(owner.arn, functools.partial)
    return (owner.arn.func, owner.arn.keywords["context"]) if bound else (owner.arn, None)
