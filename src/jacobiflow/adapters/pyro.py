"""Pyro: affine and spline autoregressive transforms, conditional ones too."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Transform

from jacobiflow.adapters.maps import ClampedAffine, StableAffine
from jacobiflow.adapters.masked import ForeignNetwork, Link, elementwise, is_masked_linear
from jacobiflow.adapters.patch import Call, Patch
from jacobiflow.adapters.transform_spec import Declined, Map, Theta, TransformSpec, own_map, parts, variant
from jacobiflow.core.bijectors import Bijector

NETWORK = {"layers", "skip_layer", "f", "input_dim", "context_dim", "param_dims"}
AFFINE = {"stable", "sigmoid_bias", "log_scale_min_clip", "log_scale_max_clip"}
SPLINE = {"count_bins", "bound", "order"}


class Inverse(Patch):
    """`transform._inverse(y)`. The transform caches the log-determinant at the returned point."""

    method = "_inverse"

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

    def parts(self) -> Iterable[nn.Module]:
        return (self.module,)

    def describe(self, net: Any) -> TransformSpec:
        network = _network(net)
        return TransformSpec(
            length=net.input_dim,
            passes=net.input_dim,
            module=net,
            contexts=(net.context_dim,),
            theta=lambda x, context: _theta(net(x) if context is None else net(x, context), x),
            maps=(self._map(),),
            networks=(network,),
            twin=self._twin,
            options=[(k, v) for k, v in vars(self.owner).items() if k in AFFINE],
        )

    def _map(self) -> Bijector:
        owner = self.owner
        if "spline" in owner._modules:
            return own_map(self._twin)
        if owner.stable:
            return StableAffine(owner.sigmoid_bias)
        return ClampedAffine(owner.log_scale_min_clip, owner.log_scale_max_clip)

    def _twin(self, theta: Theta, width: int) -> tuple[Map, Map]:
        dims = _bound(self.owner)[0].param_dims

        def arn(x: Tensor) -> tuple[Tensor, ...]:
            return _parts(theta(x), dims)

        arn.permutation = range(width)  # type: ignore[attr-defined]
        small = variant(self.owner, arn=arn)
        if isinstance(vars(small).get(self.method), Patch):
            vars(small)[self.method] = self.original().__func__.__get__(small)  # type: ignore[attr-defined]
        if "spline" in self.owner._modules:
            vars(small)["spline"] = variant(self.owner.spline, nn=arn, input_dim=width)

        def log_det() -> Tensor:
            cached: Tensor = vars(small).get("_cached_log_scale", vars(small).get("_cache_log_detJ"))
            return cached.sum(-1)

        return lambda x: (small._call(x), log_det()), lambda z: (small._inverse(z), -log_det())

    def __call__(self, y: Tensor) -> Tensor:
        solution = self.solved_batch(Call(y, _bound(self.owner)[1], self.original(), self.owner._call))
        if solution is None or solution[0].shape != y.shape:
            return self.original()(y)  # type: ignore[no-any-return]
        self.owner._call(solution[0])
        return solution[0]


class Condition(Patch):
    """`transform.condition(context)`, which returns a transform: that one is accelerated."""

    method = "condition"

    @classmethod
    def matches(cls, item: Any) -> bool:
        known = parts(item)
        return set(parts(known.get("nn"))) >= NETWORK and not set(known) >= SPLINE

    @property
    def module(self) -> nn.Module:
        return self.owner.nn  # type: ignore[no-any-return]

    def parts(self) -> Iterable[nn.Module]:
        return (self.module,)

    def describe(self, net: Any) -> TransformSpec:
        made = self.original()(torch.zeros(net.context_dim))
        if not Inverse.matches(made):
            raise Declined(f"it is conditioned to a {type(made).__name__}")
        return Inverse(made, 0.0).describe(net)

    def __call__(self, context: Tensor) -> Any:
        return self.pass_on(self.original()(context), Inverse)


def _bound(owner: Any) -> tuple[Any, Tensor | None]:
    """The network of a transform and the context that is bound to it."""
    arn = owner.arn
    if isinstance(arn, functools.partial):
        return arn.func, arn.keywords["context"]
    return arn, None


def _theta(raw: Any, x: Tensor) -> Tensor:
    """theta [n, T, P] of what the network returns, a tensor [n, T] or [n, P_i, T] per kind of parameter."""
    parts = [p.unsqueeze(-2) if p.ndim == x.ndim else p for p in raw]
    return torch.cat(parts, -2).transpose(-1, -2)


def _parts(theta: Tensor, dims: list[int]) -> tuple[Tensor, ...]:
    """What the network returns for theta [n, T, P]."""
    parts = torch.split(theta.transpose(-1, -2), dims, -2)
    return tuple(p.squeeze(-2) for p in parts) if set(dims) == {1} else parts


def _network(net: Any) -> ForeignNetwork:
    """Linear layers with activations between. With a skip from input to output they cannot be packed, but
    they give the right order."""
    layers = (*net.layers, *(() if net.skip_layer is None else (net.skip_layer,)))
    if not all(is_masked_linear(layer) for layer in layers):
        raise Declined("its network has layers that are not masked linear layers")
    links = [Link(layer, i, i > 0) for i, layer in enumerate(net.layers)]
    rows = torch.arange(links[-1].linear.out_features).view(-1, net.input_dim).T
    activation = elementwise(net.f) if net.skip_layer is None else None
    return ForeignNetwork(net.input_dim, tuple(links), activation, rows, first=net.context_dim)
