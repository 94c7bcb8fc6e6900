"""Masked networks of other libraries: their layers, what the masks determine, and how to pack them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product, starmap
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.adapters.transform_spec import Declined, variant
from jacobiflow.core.block import MaskedNetwork, Stage

Function = Callable[[Tensor], Tensor]  # as a term: of context [n, C], [n, out]
_FUNCTIONS = (
    *(torch.relu, torch.tanh, torch.sigmoid, F.relu, F.elu, F.selu, F.celu, F.gelu, F.silu, F.leaky_relu),
    *(F.softplus, F.mish, F.hardtanh, F.relu6, F.softsign, F.tanh, F.sigmoid, F.hardswish, F.logsigmoid),
)
_MODULES = (
    *(nn.ReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.LeakyReLU, nn.Softplus, nn.Mish, nn.Hardtanh),
    *(nn.ReLU6, nn.Softsign, nn.Tanh, nn.Sigmoid, nn.Hardswish, nn.LogSigmoid),
)


def elementwise(activation: Any) -> Function | None:
    """`activation` if it is known to be elementwise, so that units may be reordered; else None."""
    if type(activation) not in _MODULES and not any(activation is f for f in _FUNCTIONS):
        return None
    # An in-place activation would overwrite the cached units.
    return variant(activation, inplace=False) if getattr(activation, "inplace", False) else activation  # type: ignore[no-any-return]


def is_masked_linear(layer: Any) -> TypeGuard[nn.Linear]:
    """Whether a layer is a linear layer with a mask of its weight's shape."""
    mask = getattr(layer, "mask", None) if isinstance(layer, nn.Linear) else None
    return isinstance(mask, Tensor) and mask.shape == (layer.out_features, layer.in_features)


@dataclass(frozen=True)
class Link:
    """A masked linear layer: node `source`, activated or not, to a new node, plus node `skip`."""

    linear: nn.Linear  # with a `mask` of the weight's shape, unless it is given
    source: int
    activated: bool = True
    skip: int | None = None
    context: Function | None = None  # added
    before: nn.BatchNorm1d | None = None  # applied to the source
    norm: nn.BatchNorm1d | None = None  # applied to the new node before its activation
    given: Tensor | None = None  # the mask, if it is not the layer's own

    @property
    def mask(self) -> Tensor:
        """[out, in]."""
        return self.linear.mask if self.given is None else self.given  # type: ignore[return-value]

    def masked(self) -> Tensor:
        """The weights that are used, zeros elsewhere."""
        return self.linear.weight * self.mask.to(self.linear.weight.device).bool()

    def folded(self) -> tuple[Tensor, Tensor]:
        """Weight and bias, masked, including the normalization of the source."""
        weight = self.masked()
        bias: Tensor = weight.new_zeros(len(weight)) if self.linear.bias is None else self.linear.bias
        if self.before is None:
            return weight, bias
        factor, offset = _affine(self.before)
        return weight * factor, bias + weight @ offset


@dataclass(frozen=True)
class ForeignNetwork:
    """A masked network from features and context to `params` numbers per feature. The last link is the head.

    Node 0 is the input, node i what link i - 1 computes. Without links the order is that of the features.
    """

    links: tuple[Link, ...]
    activation: Function | None  # None: cannot be packed; the order is still right
    rows: Tensor  # [length, params], the outputs of each feature
    first: int = 0  # input column of the first feature; the other columns are context

    @property
    def length(self) -> int:
        return len(self.rows)

    def terms(self, context: Tensor, units: tuple[Tensor, ...]) -> dict[int, Tensor]:
        """What context [n, C] adds to each link, [out, n], units in packed order."""
        added = {i: link.context(context) for i, link in enumerate(self.links) if link.context is not None}
        if self.links[0].linear.in_features > self.length:
            rest = slice(0, self.first) if self.first else slice(self.length, None)
            added[0] = F.linear(context, self.links[0].folded()[0][:, rest])
        return {i: term.T[units[i + 1]] for i, term in added.items()}


def networks(
    parts: Iterable[nn.Module], activation: Any, rows: Function, context: nn.Module | None = None, first: int = 0
) -> tuple[ForeignNetwork, ...]:
    """The ways in which libraries connect the layers of these parts, from input to output.

    rows: from the outputs [length * params] to those of each feature [length, params].
    A part with two masked linear layers is a residual block; all others have one. Libraries differ in whether a
    residual block activates its input (nflows) or not (zuko), and whether the second plain layer reads the first
    one after its activation (nflows) or before (normflows). `context` is added to the first layer after activation
    (nflows) or before (normflows), and layers of the parts may add it inside residual blocks (nflows).
    """
    found = [[m for m in part.modules() if isinstance(m, nn.Linear | nn.BatchNorm1d)] for part in parts]
    blocks = [[m for m in layers if is_masked_linear(m)] for layers in found]
    if not blocks or not all(len(linears) in (1, 2) for linears in blocks):
        raise Declined("its conditioner has layers that are not masked linear layers")
    residual = any(len(linears) == 2 for linears in blocks)

    def connected(active: bool, context: Function | None, inside: bool) -> ForeignNetwork:
        links = list[Link]()
        for layers, linears in zip(found, blocks, strict=True):
            norms = [*(m for m in layers if isinstance(m, nn.BatchNorm1d)), None, None]
            inner = next((m for m in layers if isinstance(m, nn.Linear) and not is_masked_linear(m)), None)
            last = len(links)
            if len(linears) == 2:
                links[-1] = replace(links[-1], norm=norms[0])
                links.append(Link(linears[0], last, active, context=inner if inside else None, norm=norms[1]))
                links.append(Link(linears[1], last + 1, skip=last))
            else:
                read = last > 0 and not residual and (active or last > 1)
                links.append(Link(linears[0], last, read, context=None if last else context, before=norms[0]))
        outputs = torch.arange(links[-1].linear.out_features)
        return ForeignNetwork(tuple(links), elementwise(activation), rows(outputs), first)

    contexts = (None,) if context is None else (lambda given: activation(context(given)), context)
    insides = (True, False) if context is not None and residual else (False,)
    return tuple(starmap(connected, product((True, False), contexts, insides)))


@dataclass(frozen=True)
class Structure:
    """What the masks determine, for any acyclic graph: the order of the features, and the units sorted by degree."""

    order: Tensor  # [length], the feature at each position
    units: tuple[Tensor, ...]
    ends: tuple[tuple[int, ...], ...]  # ends[i][d]: units of node i of degree <= d


def structure(net: ForeignNetwork) -> Structure | None:
    """The structure of a network; None if its masks are not autoregressive in any order."""
    if not net.links:
        natural = torch.arange(net.length)
        return Structure(natural, (natural,), ())
    reads = _reads(net)
    order = _order(reads.pop()[net.rows.cpu()].any(1))
    if order is None:
        return None
    position = torch.argsort(order) + 1
    degrees = [torch.where(read, position, 0).amax(1) for read in reads]  # of a unit: the largest that it reads
    units = tuple(torch.argsort(d, stable=True) for d in degrees)
    every = torch.arange(net.length + 1)
    ends = [torch.searchsorted(d[index], every, right=True) for d, index in zip(degrees, units, strict=True)]
    return Structure(order, units, tuple(tuple(e.tolist()) for e in ends))


def _reads(net: ForeignNetwork) -> list[Tensor]:
    """For each node, [unit, feature]: whether the unit depends on the feature, in any node of its residual stream."""
    shared = [0]  # the first node of the stream that each node is part of
    for i, link in enumerate(net.links, start=1):
        shared.append(i if link.skip is None else shared[link.skip])
    masks = [link.mask.cpu().bool().float() for link in net.links]
    masks[0] = masks[0].narrow(1, net.first, net.length)
    reads = [torch.eye(net.length, dtype=torch.bool), *(torch.zeros(len(m), net.length) > 0 for m in masks)]
    for _ in net.links:  # what a stream reads at its end, it reads from its beginning
        for node, link, mask in zip(shared[1:], net.links, masks, strict=True):
            reads[node] = reads[node] | (mask @ reads[shared[link.source]].float() > 0)
    return [reads[i] for i in shared]


def _order(depends: Tensor) -> Tensor | None:
    """An order in which features depend on earlier ones only; the natural one if it will do."""
    if not bool(depends.triu().any()):
        return torch.arange(len(depends))
    for _ in range(len(depends).bit_length()):  # indirect dependencies: twice as long a chain each time
        depends = depends | (depends.float() @ depends.float() > 0)
    # Now each feature has more of them than any that it depends on.
    return None if bool(depends.diagonal().any()) else torch.argsort(depends.sum(1), stable=True)


@torch.no_grad()
def pack(net: ForeignNetwork, known: Structure) -> MaskedNetwork:
    """The network as plain data, its units sorted by degree."""
    assert net.activation is not None
    device = net.links[0].linear.weight.device
    units = [index.to(device) for index in known.units]

    def sort(link: Link, new: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = link.folded()
        weight = weight.narrow(1, net.first, net.length) if link.source == 0 else weight
        return weight[new][:, units[link.source]], bias[new, None]

    stages = list[Stage]()
    for link, new, ends in zip(net.links[:-1], units[1:], known.ends[1:], strict=True):
        norm: Any = None if link.norm is None else [t[new, None] for t in _affine(link.norm)]
        stages.append(Stage(*sort(link, new), link.source, link.activated, link.skip, ends, norm))
    head, head_bias = sort(net.links[-1], net.rows.to(device)[units[0]].flatten())
    return MaskedNetwork(net.length, tuple(stages), head, head_bias, net.activation, net.links[-1].activated)


def _affine(norm: nn.BatchNorm1d) -> tuple[Tensor, Tensor]:
    """Batch norm in eval mode is factor * x + offset."""
    mean, spread = norm.get_buffer("running_mean"), norm.get_buffer("running_var")
    factor = (spread + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight)
    return factor, (0 if norm.bias is None else norm.bias) - mean * factor
