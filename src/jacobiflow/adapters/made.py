"""The MADE of nflows, with its transforms: nflows, normflows and other copies of it, by any name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jacobiflow.adapters.maps import ForeignMap, SoftplusSpline, own_map
from jacobiflow.adapters.masked import networks
from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.transform_spec import Declined, Map, Theta, TransformSpec, parts, variant
from jacobiflow.core.bijectors import Bijector, ScaleAffine

LAYERS = {"initial_layer", "blocks", "final_layer"}
SPLINE_OPTIONS = ("tails", "tail_bound", "min_bin_width", "min_bin_height", "min_derivative")
METHODS = ("inverse", "_elementwise_forward", "_elementwise_inverse")


class Inverse(Patch):
    """`transform.inverse(inputs, context)`."""

    @classmethod
    def matches(cls, item: Any) -> bool:
        net = parts(item).get("autoregressive_net")
        return set(parts(net)) >= LAYERS and all(hasattr(type(item), method) for method in METHODS)

    def describe(self, module: Any) -> TransformSpec:
        net = module.autoregressive_net
        if self.before is not None:
            raise Declined("its inverse method was replaced on the object")
        layers = [net.initial_layer, *net.blocks, net.final_layer]
        activation = next((m.activation for m in (net, *net.blocks) if hasattr(m, "activation")), None)
        context_layer = net._modules.get("context_layer")
        candidates = networks(layers, activation, lambda r: r.view(net.initial_layer.in_features, -1), context_layer)
        length, params = candidates[0].rows.shape
        return TransformSpec(
            module=module,
            passes=length,
            context=0 if context_layer is None else context_layer.in_features,
            theta=lambda x, context: net(x, context).view(len(x), length, -1),
            maps=tuple(_maps(module, length, params)),
            networks=candidates,
            twin=partial(_twin, module),
            options=[str(getattr(module, name, None)) for name in ("tail_bound", "tails")],
        )

    def __call__(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.solved(inputs, context) or self.original()(inputs, context)


def _twin(owner: Any, theta: Theta, width: int) -> tuple[Map, Map]:
    """The transform of the first features, with given parameters instead of a network."""
    given = torch.zeros(1)

    def net(x: Tensor, context: Tensor | None = None) -> Tensor:
        if context is not given:
            raise Declined("it does not pass context on to its conditioner as it is")
        return theta(x).flatten(1).clone()  # it may be written to

    if hasattr(owner.autoregressive_net, "hidden_features"):
        net.hidden_features = owner.autoregressive_net.hidden_features  # type: ignore[attr-defined]
    twin = _part(owner, torch.arange(width), autoregressive_net=net)
    return lambda x: twin.forward(x, given), lambda z: type(twin).inverse(twin, z, given)


def _maps(owner: Any, length: int, params: int) -> Iterator[Bijector]:
    """Maps of ours that may have the same formula, then the transform's own."""
    bins, tails, bound = (getattr(owner, name, None) for name in ("num_bins", "tails", "tail_bound"))
    if isinstance(tails, list | tuple) or torch.is_tensor(bound):
        module = sys.modules[type(owner).__module__]  # normflows imports its splines there
        spline = getattr(getattr(module, "splines", None), "unconstrained_rational_quadratic_spline", None)
        if spline is None:
            raise Declined("its tails differ between features, in another way than in normflows")

        def by_feature(value: Tensor, theta: Tensor, inverse: bool, features: Tensor) -> tuple[Tensor, Tensor]:
            part = _part(owner, features)
            sizes = theta.tensor_split((owner.num_bins, 2 * owner.num_bins), -1)
            options = {name: getattr(part, name) for name in SPLINE_OPTIONS}
            return spline(value, *sizes, inverse=inverse, **options)  # type: ignore[no-any-return]

        yield ForeignMap(by_feature, features=length)
        return
    if bins is None and params == 2:
        eps = getattr(owner, "_epsilon", 1e-3)
        yield ScaleAffine("softplus", eps)
        yield ScaleAffine("sigmoid", eps)
    if tails == "linear" and bins is not None and params == 3 * bins - 1 > 2:
        yield SoftplusSpline(bins, owner.tail_bound, owner.min_bin_width, owner.min_derivative)
    yield own_map(partial(_twin, owner))


def _part(owner: Any, features: Tensor, **attributes: Any) -> Any:
    """The transform of these features only: tails and their bounds may differ between features."""
    part = variant(owner, **({"features": len(features)} | attributes))
    if isinstance(tails := getattr(owner, "tails", None), list | tuple):
        vars(part)["tails"] = [tails[i] for i in features.tolist()]
    if torch.is_tensor(bound := getattr(owner, "tail_bound", None)):
        vars(part)["tail_bound"] = bound[features]
    return part
