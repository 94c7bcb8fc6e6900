"""MADE as nflows and normflows build it; the two differ in where context enters and what is activated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow.adapters.conditioner import runs_as
from jacobiflow.adapters.foreign import Foreign, ForeignMap, Patch
from jacobiflow.adapters.masked import Link, Network, elementwise
from jacobiflow.core.bijectors import Bijector


class MadeInverse(Patch):
    """`transform.inverse(inputs, context)`."""

    method = "inverse"

    def parts(self) -> Iterable[nn.Module]:
        return (self.owner.autoregressive_net,)

    def __call__(self, inputs: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        found = self.solved(inputs, context)
        return self.original()(inputs, context) if found is None else found


def bijector(owner: Any, maps: Mapping[Any, Callable[[Any], Bijector]]) -> Bijector | None:
    """The elementwise map of a known class; None if a subclass has changed it, or scales its parameters."""
    kind = next((k for k in maps if isinstance(owner, k)), None)
    if kind is None or hasattr(owner.autoregressive_net, "hidden_features"):
        return None
    own = ("inverse", "_elementwise_forward", "_elementwise_inverse", "_elementwise")
    if any(getattr(type(owner), name, None) is not getattr(kind, name, None) for name in own):
        return None
    return maps[kind](owner)


def foreign(owner: Any, map_: Bijector, network: Network, **options: Any) -> Foreign:
    """The description of a transform with such a conditioner."""
    net, length = owner.autoregressive_net, network.length
    return Foreign(
        length=length,
        passes=length,
        module=owner,
        theta=lambda x, context: net(x, context).view(len(x), length, -1),
        bijector=map_,
        network=network,
        ours=not isinstance(map_, ForeignMap),
        **options,
    )


def known(net: Any, layer: type[nn.Module], *blocks: type[nn.Module]) -> bool:
    """Whether all layers of a MADE are the library's own."""
    linears = [net.initial_layer, net.final_layer]
    for block in net.blocks:
        if not runs_as(block, *blocks):
            return False
        linears += block.linear_layers if hasattr(block, "linear_layers") else [block.linear]
    return all(runs_as(linear, layer) for linear in linears)


def network(
    net: Any, activation: Any, *, first_active: bool, given: Callable[[Tensor], Tensor] | None, inside: bool
) -> Network:
    """The wiring of a MADE.

    first_active: whether plain blocks see the first layer activated.
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
    # Residual blocks hand on what they add up; plain ones what they activate.
    active = not residual and (first_active or len(links) > 1)
    links.append(Link(net.final_layer, len(links), active))
    length = net.initial_layer.in_features
    rows = torch.arange(net.final_layer.out_features).view(length, -1)
    return Network(length, tuple(links), elementwise(activation), rows)
