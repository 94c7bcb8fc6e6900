"""Masked MLPs as conditioners, and the unit cache that makes their windows cheap.

Units are sorted by degree (see `MaskedNetwork`), so all weights are block triangular: a window computes the units
between two degrees and never those below again. Width 1 then costs one (triangular) forward pass in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.block import BoundNetwork, Cache, MaskedNetwork, Stage, Start, take
from jacobiflow.flows.weights import MemoModule

if TYPE_CHECKING:
    from jacobiflow.flows.maf import MAFConfig

Activation = Literal["relu", "elu", "gelu", "silu", "tanh"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {name: getattr(F, name) for name in get_args(Activation)}


@dataclass
class UnitCache:
    """Hidden units [units, n] before and after activation: a window of units is one contiguous piece."""

    nodes: list[Tensor]
    active: list[Tensor]

    def select(self, rows: Tensor) -> UnitCache:
        nodes = [t[:, rows] for t in self.nodes]
        return UnitCache(nodes, [nodes[0], *(t[:, rows] for t in self.active[1:])])

    def zero_nonfinite(self) -> None:
        for t in (*self.nodes, *self.active):
            t.nan_to_num_(0, 0, 0)


@dataclass(frozen=True)
class MaskedConditioner:
    """A masked network whose hidden units are cached."""

    network: MaskedNetwork
    forward: Callable[[Tensor, Tensor | None], Tensor]  # theta [n, T, P] of x [n, T] and context, differentiable
    weights: Callable[[], Iterable[Tensor]]  # what `forward` reads now
    context: Tensor | None = None  # [n, C]
    terms: Mapping[int, Tensor] = field(default_factory=dict)  # what context adds to each stage, [units, n or 1]

    @property
    def length(self) -> int:
        return self.network.length

    def describe(self) -> BoundNetwork:
        return BoundNetwork(self.network, self.terms)

    def select(self, rows: Tensor) -> MaskedConditioner:
        if self.context is None:
            return self
        terms = {i: t if t.shape[1] == 1 else t[:, rows] for i, t in self.terms.items()}
        return replace(self, context=self.context[rows], terms=terms)

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.weights(), *(() if self.context is None else (self.context,)))

    def new_cache(self, n: int) -> UnitCache:
        sizes = [self.length, *(len(stage.weight) for stage in self.network.stages)]
        nodes = [self.network.head.new_zeros(size, n) for size in sizes]
        return UnitCache(nodes, [nodes[0], *map(torch.zeros_like, nodes[1:])])

    def first(self, n: int) -> Tensor:
        alike = all(t.shape[1] == 1 for t in self.terms.values())  # rows without context of their own
        cache = self.new_cache(1 if alike else n)
        self._update(cache, cache.nodes[0].T[..., None], 0, 0, 1, 0)
        return self._theta(cache, 0, 1).expand(n, -1, -1)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        assert isinstance(cache, UnitCache)
        # One rectangle for all rows, from the lowest position to the highest: then each takes its own window.
        low, high = (start, start) if isinstance(start, int) else torch.stack(start.aminmax()).tolist()
        high = min(high + width, self.length)
        self._update(cache, x, low - 1, high - 1, start, width)
        return take(self._theta(cache, low, high), start - low, width)

    def all_params(self, x: Tensor) -> Tensor:
        return self.forward(x[..., 0], self.context)

    def _update(self, cache: UnitCache, x: Tensor, lo: int, hi: int, start: Start, width: int) -> None:
        """Evaluate the units of degree lo + 1 .. hi, and keep those of each row's own window."""
        net, nodes, active = self.network, cache.nodes, cache.active
        ends = [range(self.length + 1), *(stage.ends for stage in net.stages)]  # of each node
        _keep([(nodes[0], x[:, lo:hi, 0].T)], slice(lo, hi), ends[0], start, width)
        for i, stage in enumerate(net.stages):
            units = slice(stage.ends[lo] if lo else 0, stage.ends[hi])  # units of degree 0 come with the first
            if units.start == units.stop:
                continue
            source, cols = (active if stage.activated else nodes)[stage.source], ends[stage.source][hi]
            out = torch.addmm(stage.bias[units], stage.weight[units, :cols], source[:cols])
            if i in self.terms:
                out += self.terms[i][units]
            if stage.skip is not None:
                out += nodes[stage.skip][units]
            seen = out if stage.norm is None else torch.addcmul(stage.norm[1][units], out, stage.norm[0][units])
            pairs = [(nodes[i + 1], out), (active[i + 1], net.activation(seen))]
            _keep(pairs, units, stage.ends, start, width)

    def _theta(self, cache: UnitCache, lo: int, hi: int) -> Tensor:
        """Parameters of positions lo .. hi - 1, [n, hi - lo, P]."""
        net = self.network
        rows, cols = slice(lo * net.params, hi * net.params), net.stages[-1].ends[hi - 1]
        source = (cache.active if net.head_activated else cache.nodes)[-1]
        out = torch.addmm(net.head_bias[rows], net.head[rows, :cols], source[:cols])
        return out.view(hi - lo, net.params, out.shape[1]).permute(2, 0, 1)


def _keep(pairs: Sequence[tuple[Tensor, Tensor]], units: slice, ends: Sequence[int], start: Start, width: int) -> None:
    """Write new units [units, n] of a node where they are of the row's own window. pairs: where to, and what."""
    if isinstance(start, int):
        for kept, new in pairs:
            kept[units] = new
        return
    table = torch.tensor(ends, device=start.device)
    first, last = table[start - 1], table[(start + width - 1).clamp_max(len(table) - 1)]
    at = torch.arange(units.start, units.stop, device=start.device)[:, None]
    mine = (at >= torch.where(start == 1, 0, first)) & (at < last)
    for kept, new in pairs:
        kept[units] = torch.where(mine, new, kept[units])


class MaskedMLP(MemoModule):
    """theta [n, T, P], that of position t a function of x_{<t} and context; plain layers or residual blocks."""

    def __init__(self, config: MAFConfig) -> None:
        super().__init__()
        length, params, widths = config.features, config.bijector().params, config.widths()
        self.length, self.params, self.residual = length, params, config.residual
        self.activation = ACTIVATIONS[config.activation]
        low = 0 if config.context or length == 1 else 1  # units of degree 0 see no position: they carry context
        evenly = (low + torch.arange(width) * (length - low) // width for width in widths)
        self.degrees = [torch.arange(1, length + 1), *evenly]
        self.linears = nn.ModuleList(nn.Linear(len(a), len(b)) for a, b in pairwise(self.degrees))
        self.context = nn.Linear(config.context, widths[0], bias=False) if config.context else None
        self.head = nn.Linear(widths[-1], length * params)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        for i, (a, b) in enumerate(pairwise(self.degrees)):
            self.register_buffer(f"mask{i}", b[:, None] >= a[None, :], persistent=False)
        position = torch.arange(length).repeat_interleave(params)
        self.register_buffer("head_mask", position[:, None] >= self.degrees[-1], persistent=False)

    def masked(self, i: int) -> Tensor:
        """Weight i without the connections that would look ahead."""
        linear, mask = self.linears[i], self.get_buffer(f"mask{i}")
        return linear.weight * mask  # type: ignore[operator]

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        """theta [n, T, P] from x [n, T], all positions at once."""
        nodes = [x]
        for i, linear in enumerate(self.linears):
            out = F.linear(self.activation(nodes[i]) if i else x, self.masked(i), linear.bias)  # type: ignore[arg-type]
            if i == 0 and self.context is not None:
                out = out + self.context(context)
            elif i and i % 2 == 0 and self.residual:
                out = out + nodes[i - 1]
            nodes.append(out)
        h = self.activation(nodes[-1])
        theta = F.linear(h, self.head.weight * self.head_mask, self.head.bias)  # type: ignore[operator]
        return theta.view(*theta.shape[:-1], self.length, self.params)

    def _pack(self) -> MaskedNetwork:
        every = torch.arange(self.length + 1, device=self.degrees[0].device)
        stages = list[Stage]()
        for i, degrees in enumerate(self.degrees[1:]):
            bias = self.linears[i].bias[:, None].clone()  # type: ignore[index]
            skip = i - 1 if self.residual and i > 0 and i % 2 == 0 else None
            ends = tuple(torch.searchsorted(degrees, every, right=True).tolist())
            stages.append(Stage(self.masked(i), bias, i, i > 0, skip, ends))
        head = self.head.weight * self.head_mask  # type: ignore[operator]
        return MaskedNetwork(self.length, tuple(stages), head, self.head.bias[:, None].clone(), self.activation)

    def bind(self, context: Tensor | None) -> MaskedConditioner:
        with torch.no_grad():
            terms = {} if self.context is None else {0: self.context(context).T.contiguous()}
        return MaskedConditioner(self.reuse(self._pack), self, self.parameters, context, terms)
