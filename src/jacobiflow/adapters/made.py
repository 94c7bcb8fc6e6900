"""The MADE of nflows, with its transforms: nflows, normflows and other copies of it, by any name.

The copies differ in where context enters, in what is activated and in their elementwise maps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from jacobiflow.adapters.maps import SoftplusSpline
from jacobiflow.adapters.masked import ForeignNetwork, Link, elementwise, is_masked_linear
from jacobiflow.adapters.patch import Call, Patch
from jacobiflow.adapters.transform_spec import (
    Declined,
    ForeignMap,
    Map,
    Theta,
    TransformSpec,
    own_map,
    parts,
    variant,
)
from jacobiflow.core.bijectors import Bijector, ScaleAffine

LAYERS = {"initial_layer", "blocks", "final_layer"}
METHODS = ("inverse", "_elementwise_forward", "_elementwise_inverse")


class Inverse(Patch):
    """`transform.inverse(inputs, context)`."""

    method = "inverse"

    @classmethod
    def matches(cls, item: Any) -> bool:
        net = parts(item).get("autoregressive_net")
        has_layers = set(parts(net)) >= LAYERS
        return has_layers and all(hasattr(type(item), method) for method in METHODS)

    def describe(self, module: Any) -> TransformSpec:
        net = module.autoregressive_net
        if self.before is not None:
            raise Declined("its inverse method was replaced on the object")
        networks = tuple(_networks(net))
        length, params = networks[0].rows.shape
        context_layer = net._modules.get("context_layer")
        bounds = getattr(module, "tail_bound", None), getattr(module, "tails", None)
        return TransformSpec(
            length=length,
            passes=length,
            module=module,
            contexts=(0,) if context_layer is None else (0, context_layer.in_features),
            theta=lambda x, context: net(x, context).view(len(x), length, -1),
            maps=tuple(_maps(module, length, params)),
            networks=networks,
            twin=partial(_twin, module),
            options=[str(bound) for bound in bounds],
        )

    def __call__(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        solved = self.solved(Call(inputs, context, lambda z: self.original()(z, context)))
        return self.original()(inputs, context) if solved is None else solved


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


# The elementwise map


def _maps(owner: Any, length: int, params: int) -> Iterator[Bijector]:
    """Maps of ours that may have the same formula, then the transform's own."""
    bins, tails, bound = (getattr(owner, name, None) for name in ("num_bins", "tails", "tail_bound"))
    if isinstance(tails, list | tuple) or torch.is_tensor(bound):
        yield ForeignMap(_feature_map(owner), features=length)
        return
    if bins is None and params == 2:
        eps = getattr(owner, "_epsilon", 1e-3)
        yield ScaleAffine("softplus", eps)
        yield ScaleAffine("sigmoid", eps)
    if tails == "linear" and bins is not None and params == 3 * bins - 1 > 2:
        yield SoftplusSpline(bins, owner.tail_bound, owner.min_bin_width, owner.min_derivative)
    yield own_map(partial(_twin, owner))


def _feature_map(owner: Any) -> Callable[..., tuple[Tensor, Tensor]]:
    """The spline of normflows whose tails and bounds differ between features: the function that the module of
    the class imports."""
    splines = getattr(sys.modules[type(owner).__module__], "splines", None)
    spline = getattr(splines, "unconstrained_rational_quadratic_spline", None)
    if spline is None:
        raise Declined("its tails differ between features, in another way than in normflows")
    limits = {name: getattr(owner, name) for name in ("min_bin_width", "min_bin_height", "min_derivative")}
    ends = (owner.num_bins, 2 * owner.num_bins)

    def function(value: Tensor, theta: Tensor, inverse: bool, features: Tensor) -> tuple[Tensor, Tensor]:
        part = _part(owner, features)
        own = {"tails": part.tails, "tail_bound": part.tail_bound} | limits
        return spline(value, *theta.tensor_split(ends, -1), inverse=inverse, **own)  # type: ignore[no-any-return]

    return function


def _part(owner: Any, features: Tensor, **attributes: Any) -> Any:
    """The transform of these features only: tails and their bounds may differ between features."""
    part = variant(owner, **({"features": len(features)} | attributes))
    if isinstance(tails := getattr(owner, "tails", None), list | tuple):
        vars(part)["tails"] = [tails[i] for i in features.tolist()]
    if torch.is_tensor(bound := getattr(owner, "tail_bound", None)):
        vars(part)["tail_bound"] = bound[features]
    return part


# The network


def _networks(net: Any) -> Iterator[ForeignNetwork]:
    """The ways in which copies of MADE connect these layers.

    Plain blocks read the first layer after activation (nflows) or before (normflows). Context is added to the
    first layer after activation (nflows) or before (normflows), and again inside residual blocks (nflows).
    """
    blocks = list(net.blocks)
    layers = [net.initial_layer, net.final_layer]
    for block in blocks:
        layers += getattr(block, "linear_layers", None) or [getattr(block, "linear", None)]
    if not all(is_masked_linear(layer) for layer in layers):
        raise Declined("its conditioner has layers that are not masked linear layers")
    activation = next((m.activation for m in (net, *blocks) if hasattr(m, "activation")), None)
    context = net._modules.get("context_layer")
    plain = any(hasattr(block, "linear") for block in blocks)
    for first_active, context_active, inside in product(
        (True, False) if plain else (True,),
        (True, False) if context is not None else (False,),
        (True, False) if context is not None and not plain else (False,),
    ):
        added = _activated(activation, context) if context_active else context
        yield _network(net, activation, first_active, added, inside)


def _activated(activation: Any, layer: Any) -> Callable[[Tensor], Tensor]:
    return lambda context: activation(layer(context))


def _network(
    net: Any, activation: Any, first_active: bool, context: Callable[[Tensor], Tensor] | None, inside: bool
) -> ForeignNetwork:
    links = [Link(net.initial_layer, 0, False, context=context)]
    residual = False
    for block in net.blocks:
        last = len(links)
        if hasattr(block, "linear_layers"):
            residual = True
            norms = block.batch_norm_layers if block.use_batch_norm else (None, None)
            links[-1] = replace(links[-1], norm=norms[0])
            again = getattr(block, "context_layer", None) if inside else None
            links.append(Link(block.linear_layers[0], last, context=again, norm=norms[1]))
            links.append(Link(block.linear_layers[1], last + 1, skip=last))
        else:
            links.append(Link(block.linear, last, first_active or last > 1, before=block.batch_norm))
    # The head reads the sum of residual blocks as it is, the output of plain blocks after activation.
    active = not residual and (first_active or len(links) > 1)
    links.append(Link(net.final_layer, len(links), active))
    length = net.initial_layer.in_features
    rows = torch.arange(net.final_layer.out_features).view(length, -1)
    return ForeignNetwork(length, tuple(links), elementwise(activation), rows)
