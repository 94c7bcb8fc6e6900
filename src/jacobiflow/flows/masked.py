"""Masked MLPs as conditioners, and the unit cache that makes their windows cheap.

Every hidden unit has a degree d and sees positions 0 .. d - 1 only; parameters of position t see
units of degree t or less. Units are sorted by degree, so all weights are block triangular: a window
recomputes the rows between two degrees from the columns below one, and what lies below the window is
never touched again. Width 1 then costs one (triangular) forward pass in all.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.native import usable
from jacobiflow.core.types import Cache
from jacobiflow.flows.native_masked import NativeMasked, kind
from jacobiflow.flows.units import Units
from jacobiflow.flows.weights import Watched, tensors_of

Activation = Literal["relu", "elu", "gelu", "silu", "tanh"]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "elu": F.elu,
    "gelu": F.gelu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def unit_degrees(units: int, length: int, *, context: bool) -> Tensor:
    """Degrees of a hidden layer, sorted and evenly spread.

    Degree 0 sees no position: it is of use only to carry context, or where there is one position.

    >>> unit_degrees(6, 4, context=False).tolist()
    [1, 1, 2, 2, 3, 3]
    """
    low = 0 if context or length == 1 else 1
    return low + torch.arange(units) * (length - low) // units


def layer_widths(hidden: tuple[int, ...], residual: bool) -> list[int]:
    """Widths of all hidden layers; a residual block has two."""
    return [hidden[0], *(w for h in hidden[1:] for w in ((h, h) if residual else (h,)))]


@dataclass(frozen=True)
class Stage:
    """One masked linear map: node `source`, activated or not, to a new node, plus node `skip`."""

    weight: Tensor  # [out, in], masked
    bias: Tensor  # [out, 1]
    source: int
    activated: bool
    skip: int | None
    ends: tuple[int, ...]  # ends[d]: how many of the new node's units have degree <= d
    norm: tuple[Tensor, Tensor] | None = None  # [out, 1] each: activation sees factor * node + offset


@dataclass(frozen=True)
class Packed:
    """A masked network ready for decoding. Node 0 is the input, node i the output of stage i - 1.

    Nodes are [units, n]: a window of units is one contiguous piece, whatever the batch.
    """

    length: int
    stages: tuple[Stage, ...]  # of the hidden units
    head: Tensor  # [T * P, units], rows position by position
    head_bias: Tensor  # [T * P, 1]
    activation: Callable[[Tensor], Tensor]
    head_activated: bool = True  # whether the head reads the last node after its activation

    @property
    def params(self) -> int:
        """P, numbers a position."""
        return len(self.head) // self.length

    @cached_property
    def native(self) -> NativeMasked | None:
        """The network for the compiled function, if that knows all its parts."""
        lib, known = usable(self.head), kind(self.activation)
        odd = any(stage.skip == 0 for stage in self.stages) or not self.stages
        return None if lib is None or known is None or odd else NativeMasked(lib, self, known)

    def new_cache(self, n: int, context: Mapping[int, Tensor]) -> Units:
        """Room for the units of n rows; context[i] [units, n or 1] is added to what stage i computes."""
        if usable(self.head) is not None and self.native is not None:
            return self.native.new_cache(n, context)
        sizes = [self.length, *(len(s.weight) for s in self.stages)]
        nodes = [self.head.new_empty(size, n) for size in sizes]
        active = [node if i == 0 else torch.empty_like(node) for i, node in enumerate(nodes)]
        return UnitCache(self, nodes, active, context)


@dataclass
class UnitCache(Units):
    """Hidden units [units, n] before and after activation."""

    packed: Packed
    nodes: list[Tensor]
    active: list[Tensor]
    context: Mapping[int, Tensor]
    valid: int = 0

    def select(self, rows: Tensor) -> UnitCache:
        context = {i: t if t.shape[1] == 1 else t[:, rows] for i, t in self.context.items()}
        nodes = [t.new_empty(len(t), len(rows)) for t in self.nodes]
        active = [node if i == 0 else torch.empty_like(node) for i, node in enumerate(nodes)]
        fresh = UnitCache(self.packed, nodes, active, context, self.valid)
        ends = [self.valid, *(s.ends[self.valid] for s in self.packed.stages)]
        for new, old, end in zip(fresh.nodes, self.nodes, ends, strict=True):
            new[:end] = old[:end, rows]
        for new, old, end in zip(fresh.active[1:], self.active[1:], ends[1:], strict=True):
            new[:end] = old[:end, rows]
        return fresh

    def params(self, x: Tensor, lo: int, hi: int) -> Tensor:
        if self.valid < hi - 1 or not self.valid:
            self.update(x, hi - 1)
        return self.theta(lo, hi)

    def update(self, x: Tensor, upto: int) -> None:
        """Evaluate every unit that sees a position of valid .. upto - 1 and none beyond."""
        first, p = self.valid, self.packed
        fresh = first == 0  # units of degree 0 see no position: they come with the first window
        self.nodes[0][first:upto] = x[:, first:upto, 0].T
        for i, stage in enumerate(p.stages):
            lo, hi = 0 if fresh else stage.ends[first], stage.ends[upto]
            if lo == hi:
                continue
            source = self.active[stage.source] if stage.activated else self.nodes[stage.source]
            cols = upto if stage.source == 0 else p.stages[stage.source - 1].ends[upto]
            out = self.nodes[i + 1][lo:hi]
            torch.addmm(stage.bias[lo:hi], stage.weight[lo:hi, :cols], source[:cols], out=out)
            if i in self.context:
                out += self.context[i][lo:hi]
            if stage.skip is not None:
                out += self.nodes[stage.skip][lo:hi]
            if stage.norm is not None:
                out = torch.addcmul(stage.norm[1][lo:hi], out, stage.norm[0][lo:hi])
            self.active[i + 1][lo:hi] = p.activation(out)
        self.valid = upto

    def theta(self, lo: int, hi: int) -> Tensor:
        """Parameters of positions lo .. hi - 1, [n, hi - lo, P]."""
        p, last = self.packed, self.packed.stages[-1]
        rows, cols = slice(lo * p.params, hi * p.params), last.ends[hi - 1]
        source = self.active[-1] if p.head_activated else self.nodes[-1]
        out = torch.addmm(p.head_bias[rows], p.head[rows, :cols], source[:cols])
        return out.view(hi - lo, p.params, out.shape[1]).permute(2, 0, 1)


class MaskedMLP(Watched):
    """Parameters [n, T, P] of T positions, those of position t a function of x_{<t} and context.

    hidden: plain layers of these widths; with `residual`, a first layer and then residual blocks
    h + W2 act(W1 act(h)), one for each further width, all the same.
    """

    def __init__(
        self,
        length: int,
        params: int,
        hidden: tuple[int, ...],
        *,
        context: int = 0,
        residual: bool = False,
        activation: Activation = "relu",
    ) -> None:
        super().__init__()
        self.length, self.params, self.residual = length, params, residual
        self.activation = ACTIVATIONS[activation]
        widths = layer_widths(hidden, residual)
        self.degrees = [torch.arange(1, length + 1)]
        self.degrees += [unit_degrees(w, length, context=context > 0) for w in widths]
        self.linears = nn.ModuleList(nn.Linear(len(a), len(b)) for a, b in pairwise(self.degrees))
        self.context = nn.Linear(context, widths[0], bias=False) if context else None
        self.head = nn.Linear(widths[-1], length * params)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        for i, (a, b) in enumerate(pairwise(self.degrees)):
            self.register_buffer(f"mask{i}", b[:, None] >= a[None, :], persistent=False)
        reach = torch.arange(length).repeat_interleave(params)
        self.register_buffer("head_mask", reach[:, None] >= self.degrees[-1], persistent=False)

    def masked(self, i: int) -> Tensor:
        """Weight i without the connections that would look ahead."""
        linear, mask = self.linears[i], self.get_buffer(f"mask{i}")
        return linear.weight * mask  # type: ignore[operator]

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        """theta [n, T, P] from x [n, T], all positions at once."""
        h = F.linear(x, self.masked(0), self.linears[0].bias)  # type: ignore[arg-type]
        if self.context is not None:
            h = h + self.context(context)
        step = 2 if self.residual else 1
        for i in range(1, len(self.linears), step):
            out = h
            for j in range(i, i + step):
                out = F.linear(self.activation(out), self.masked(j), self.linears[j].bias)  # type: ignore[arg-type]
            h = h + out if self.residual else out
        theta = F.linear(self.activation(h), self.head.weight * self.head_mask, self.head.bias)  # type: ignore[operator]
        return theta.view(*theta.shape[:-1], self.length, self.params)

    def pack(self) -> Packed:
        """The network for decoding; made again only when a weight has changed."""
        return self.watch.fresh(tensors_of(self), self._pack)

    def _pack(self) -> Packed:
        stages = []
        for i, linear in enumerate(self.linears):
            second = self.residual and i > 0 and i % 2 == 0
            degrees = self.degrees[i + 1].tolist()
            stages.append(
                Stage(
                    weight=self.masked(i),
                    bias=linear.bias[:, None].clone(),  # type: ignore[index]
                    source=i,
                    activated=i > 0,
                    skip=i - 1 if second else None,
                    ends=tuple(bisect_right(degrees, d) for d in range(self.length + 1)),
                )
            )
        head = self.head.weight * self.head_mask  # type: ignore[operator]
        return Packed(self.length, tuple(stages), head, self.head.bias[:, None].clone(), self.activation)


@dataclass(frozen=True)
class BoundMaskedBlock:
    """A masked MLP and a bijector with context bound: what decoders see."""

    net: MaskedMLP
    bijector: Bijector
    context: Tensor | None = None  # [n, C]

    @property
    def length(self) -> int:
        return self.net.length

    @property
    def rows(self) -> int | None:
        return None

    def select(self, rows: Tensor) -> BoundMaskedBlock:
        return self if self.context is None else replace(self, context=self.context[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.net.parameters(), *(() if self.context is None else (self.context,)))

    def new_cache(self, n: int) -> Units:
        context = {}
        if self.context is not None and self.net.context is not None:
            context[0] = self.net.context(self.context).T.contiguous()
        return self.net.pack().new_cache(n, context)

    def params(self, x: Tensor, lo: int, hi: int, cache: Cache | None = None) -> Tensor:
        if cache is None and torch.is_grad_enabled():
            return self.net(x[..., 0], self.context)[:, lo:hi]  # type: ignore[no-any-return]
        units = cache if isinstance(cache, Units) else self.new_cache(len(x))
        return units.params(x, lo, hi)

    def single(self, x: Tensor, z: Tensor, lo: int, hi: int, cache: Cache | None) -> Tensor | None:
        """As `Units.single`."""
        by = getattr(self.bijector, "compiled", None)
        return cache.single(x, z, lo, hi, by) if by is not None and isinstance(cache, Units) else None

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.bijector.forward(x, theta)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.bijector.inverse(z, theta)
