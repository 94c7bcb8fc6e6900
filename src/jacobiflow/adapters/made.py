"""MADE, as in nflows and normflows. They differ in where context enters and in what is activated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow.adapters.masked import ForeignNetwork, Link, elementwise
from jacobiflow.adapters.module_state import runs_as
from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.transform_spec import TransformSpec
from jacobiflow.core.bijectors import Bijector, Spline
from jacobiflow.core.description import Formula


class MadeInverse(Patch):
    """`transform.inverse(inputs, context)`."""

    method = "inverse"

    def parts(self) -> Iterable[nn.Module]:
        return (self.owner.autoregressive_net,)

    def __call__(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = self.solved(inputs, context)
        return self.original()(inputs, context) if found is None else found


class SoftplusSpline(Spline):
    """A spline whose slopes are softplus(theta) without an offset, as in nflows and normflows."""

    def describe(self) -> Formula:
        return Formula("spline", (self.bins, self.bound, self.min_bin, self.min_slope, self._offset))

    @property
    def _offset(self) -> float:
        return 0.0


def bijector(owner: Any, maps: Mapping[Any, Callable[[Any], Bijector]]) -> Bijector | None:
    """The elementwise map of a known class; None if a subclass changes it or rescales its parameters."""
    kind = next((k for k in maps if isinstance(owner, k)), None)
    if kind is None or hasattr(owner.autoregressive_net, "hidden_features"):
        return None
    own = ("inverse", "_elementwise_forward", "_elementwise_inverse", "_elementwise")
    if any(getattr(type(owner), name, None) is not getattr(kind, name, None) for name in own):
        return None
    return maps[kind](owner)


def spec(owner: Any, map_: Bijector, network: ForeignNetwork, contexts: tuple[int, ...]) -> TransformSpec:
    """The description of a transform with a MADE."""
    net, length = owner.autoregressive_net, network.length
    return TransformSpec(
        length=length,
        passes=length,
        module=owner,
        contexts=contexts,
        theta=lambda x, context: net(x, context).view(len(x), length, -1),
        bijector=map_,
        network=network,
    )


def known(net: Any, layer: type[nn.Module], *blocks: type[nn.Module]) -> bool:
    """Whether all layers of a MADE are of the library's own classes."""
    linears = [net.initial_layer, net.final_layer]
    for block in net.blocks:
        if not runs_as(block, *blocks):
            return False
        linears += block.linear_layers if hasattr(block, "linear_layers") else [block.linear]
    return all(runs_as(linear, layer) for linear in linears)


def network(
    net: Any, activation: Any, *, first_active: bool, given: Callable[[Tensor], Tensor] | None, inside: bool
) -> ForeignNetwork:
    """The layers of a MADE and how they are connected.

    first_active: whether plain blocks read the first layer after activation.
    given: what context [n, C] adds to the first layer; inside: whether residual blocks add it again.
    """
    links = [Link(net.initial_layer, 0, False, context=given)]
    residual = False
    for block in net.blocks:
        last = len(links)
        if hasattr(block, "linear_layers"):
            residual = True
            norms = block.batch_norm_layers if block.use_batch_norm else (None, None)
            links[-1] = replace(links[-1], norm=norms[0])
            context = block.context_layer if inside else None
            links.append(Link(block.linear_layers[0], last, context=context, norm=norms[1]))
            links.append(Link(block.linear_layers[1], last + 1, skip=last))
        else:
            links.append(Link(block.linear, last, first_active or last > 1, before=block.batch_norm))
    # The head reads the sum of residual blocks as it is, the output of plain blocks after activation.
    active = not residual and (first_active or len(links) > 1)
    links.append(Link(net.final_layer, len(links), active))
    length = net.initial_layer.in_features
    rows = torch.arange(net.final_layer.out_features).view(length, -1)
    return ForeignNetwork(length, tuple(links), elementwise(activation), rows)
