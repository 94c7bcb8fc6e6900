"""Masked networks of other libraries: their layers, what the masks determine, and how to pack them.

An adapter lists the masked linear layers of a network and how they are connected. The masks tell which unit
depends on which feature. That gives the order of the features and the degree of every unit for any
convention: natural or permuted orders, several features per pass, any acyclic graph.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.networks import MaskedNetwork, Stage

_FUNCTIONS = (
    *(torch.relu, torch.tanh, torch.sigmoid, F.relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.leaky_relu),
    *(F.softplus, F.mish, F.hardtanh, F.relu6, F.softsign, F.tanh, F.sigmoid, F.hardswish, F.logsigmoid),
)
_MODULES = (
    *(nn.ReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Hardtanh),
    *(nn.ReLU6, nn.Softsign, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.LogSigmoid),
)


def elementwise(activation: Any) -> Callable[[Tensor], Tensor] | None:
    """`activation` if it is known to be elementwise, so that units may be reordered; else None."""
    known = type(activation) in _MODULES or any(activation is f for f in _FUNCTIONS)
    # An in-place activation would overwrite the cached units.
    own = type(activation)() if known and getattr(activation, "inplace", False) else activation
    return own if known else None


def is_masked_linear(layer: Any) -> bool:
    """Whether a layer is a linear layer with a mask of its weight's shape."""
    return (
        isinstance(layer, nn.Linear)
        and isinstance(mask := getattr(layer, "mask", None), Tensor)
        and mask.shape == (layer.out_features, layer.in_features)
    )


@dataclass(frozen=True)
class Link:
    """A masked linear layer: node `source`, activated or not, to a new node, plus node `skip`."""

    linear: nn.Linear  # with a `mask` of the weight's shape, unless it is given
    source: int
    activated: bool = True
    skip: int | None = None
    context: Callable[[Tensor], Tensor] | None = None  # [n, C] -> [n, out], added
    before: nn.BatchNorm1d | None = None  # applied to the source
    norm: nn.BatchNorm1d | None = None  # applied to the new node before its activation
    given: Tensor | None = None  # the mask, if it is not the layer's own

    @property
    def mask(self) -> Tensor:
        """[out, in], true where a weight is used."""
        mask = self.linear.mask if self.given is None else self.given.to(self.linear.weight.device)
        return mask.bool()  # type: ignore[operator]

    def masked(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of the layer alone, masked."""
        weight = self.linear.weight * self.mask
        return weight, weight.new_zeros(len(weight)) if self.linear.bias is None else self.linear.bias

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias, masked, including the normalization of the source."""
        weight, bias = self.masked()
        if self.before is not None:
            factor, offset = _affine(self.before)
            weight, bias = weight * factor, bias + weight @ offset
        return weight, bias


@dataclass(frozen=True)
class ForeignNetwork:
    """A masked network from features and context to `params` numbers per feature. The last link is the head.

    Node 0 is the input, node i what link i - 1 computes. Without links the order is that of the features.
    """

    length: int
    links: tuple[Link, ...]
    activation: Callable[[Tensor], Tensor] | None  # None: cannot be packed; the order is still right
    rows: Tensor  # [length, params], the outputs of each feature
    first: int = 0  # input column of the first feature; the other columns are context

    @property
    def columns(self) -> slice:
        """The input columns of the features."""
        return slice(self.first, self.first + self.length)

    def terms(self, context: Tensor, units: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """What context [n, C] adds to each link, [out, n], units in packed order."""
        added = {i: link.context(context) for i, link in enumerate(self.links) if link.context is not None}
        if self.links[0].linear.in_features > self.length:
            rest = slice(0, self.first) if self.first else slice(self.length, None)
            added[0] = F.linear(context, self.links[0].folded()[0][:, rest])
        return {i: term.T[units[i + 1]] for i, term in added.items()}


@dataclass(frozen=True)
class Structure:
    """What the masks determine: the order of the features, and the units of each node sorted by degree."""

    order: Tensor  # [length], the feature at each position
    units: tuple[Tensor, ...]
    ends: tuple[tuple[int, ...], ...]  # ends[i][d]: units of node i of degree <= d


def structure(net: ForeignNetwork) -> Structure | None:
    """The structure of a network; None if its masks are not autoregressive in any order."""
    masks = [link.mask.cpu() for link in net.links]
    if not masks:
        natural = torch.arange(net.length)
        return Structure(natural, (natural,), ())
    masks[0] = masks[0][:, net.columns]
    order = _order(_dependencies(net, masks))
    if order is None:
        return None
    position = torch.argsort(order)
    degrees = _degrees(net, masks, position + 1)
    highest = torch.where(masks[-1], degrees[-1], 0).amax(1)[net.rows.cpu()]
    if bool((highest > position[:, None]).any()):
        return None
    units = (order, *(torch.argsort(d, stable=True) for d in degrees[1:]))
    ends = []
    for degree, index in zip(degrees, units, strict=True):
        ranked = degree[index].tolist()
        ends.append(tuple(bisect_right(ranked, d) for d in range(net.length + 1)))
    return Structure(order, units, tuple(ends))


def _dependencies(net: ForeignNetwork, masks: list[Tensor]) -> Tensor:
    """[feature, feature]: whether the parameters of one feature depend on the other."""
    reads = [torch.eye(net.length, dtype=torch.float32)]  # per node: [unit, feature]
    for link, mask in zip(net.links, masks, strict=True):
        new = (mask.float() @ reads[link.source] > 0).float()
        reads.append(new if link.skip is None else torch.maximum(new, reads[link.skip]))
    return reads[-1][net.rows.cpu()].any(1)


def _order(depends: Tensor) -> Tensor | None:
    """An order in which each feature depends on earlier ones only; the natural order if it is one."""
    if not bool(depends.triu().any()):
        return torch.arange(len(depends))
    while True:  # add indirect dependencies: then each feature has more of them than any that it depends on
        wider = depends | (depends.float() @ depends.float() > 0)
        if torch.equal(wider, depends):
            return None if bool(depends.diagonal().any()) else torch.argsort(depends.sum(1), stable=True)
        depends = wider


def _degrees(net: ForeignNetwork, masks: list[Tensor], features: Tensor) -> list[Tensor]:
    """Degrees of the units of each node except the head: a unit's degree is the largest that it reads.

    A node that adds a skip shares the units, and so the degrees, of the node that is added.
    """
    shared = [0]  # the first node of the residual stream that each node is part of
    for i, link in enumerate(net.links[:-1], start=1):
        shared.append(i if link.skip is None else shared[link.skip])
    degrees = [features, *(torch.zeros(len(mask), dtype=torch.long) for mask in masks[:-1])]
    raised = True
    while raised:
        raised = False
        for i, (link, mask) in enumerate(zip(net.links[:-1], masks[:-1], strict=True), start=1):
            read = torch.where(mask, degrees[shared[link.source]], 0).amax(1)
            new = torch.maximum(read, degrees[shared[i]])
            raised |= not torch.equal(new, degrees[shared[i]])
            degrees[shared[i]] = new
    return [degrees[i] for i in shared]


def pack(net: ForeignNetwork, known: Structure) -> MaskedNetwork:
    """The network as plain data, its units sorted by degree."""
    assert net.activation is not None
    stages = []
    units = [index.to(net.links[0].linear.weight.device) for index in known.units]
    *hidden, last = net.links
    with torch.no_grad():
        for i, link in enumerate(hidden):
            weight, bias = link.folded()
            weight = weight[:, net.columns] if i == 0 else weight
            norm = None
            if link.norm is not None:
                factor, offset = (v[units[i + 1], None] for v in _affine(link.norm))
                norm = factor, offset
            stages.append(
                Stage(
                    weight=weight[units[i + 1]][:, units[link.source]],
                    bias=bias[units[i + 1], None],
                    source=link.source,
                    activated=link.activated,
                    skip=link.skip,
                    ends=known.ends[i + 1],
                    norm=norm,
                )
            )
        weight, bias = last.folded()
        rows = net.rows.to(weight.device)[units[0]].flatten()
        head = weight[rows][:, units[last.source]]
    return MaskedNetwork(net.length, tuple(stages), head, bias[rows, None], net.activation, last.activated)


def _affine(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Batch norm in eval mode is factor * x + offset."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    factor = (norm.running_var + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight
    offset = -norm.running_mean * factor
    return factor, offset if norm.bias is None else offset + norm.bias
