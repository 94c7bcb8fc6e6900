"""A local conditioner: one small network with the same weights at every site of a lattice.

The parameters of a site depend on nearby sites that come before it, and on which of them do. No cache is
needed: a window of positions costs its share of a forward pass, and all windows of width 1 cost one pass.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.block import Cache, NoCache, Start
from jacobiflow.flows.masked_mlp import ACTIVATIONS, Activation


def neighbourhood(side: int, reach: int) -> Tensor:
    """Sites within `reach` rows and columns of each site of a side x side torus, [side^2, W].

    >>> neighbourhood(3, 1)[4].tolist()
    [0, 1, 2, 3, 5, 6, 7, 8]
    """
    step = torch.arange(-reach, reach + 1)
    offsets: Tensor = torch.cartesian_prod(step, step)
    down, right = offsets[offsets.any(1)].T
    site = torch.arange(side**2)[:, None]
    near: Tensor = (site // side + down) % side * side + (site + right) % side
    return near


def spread(side: int, spacing: int) -> Tensor:
    """The sites of a side x side torus in spacing^2 classes, [spacing^2, side^2 / spacing^2].

    Sites of one class are `spacing` apart. With reach < spacing none sees another, so that a class is solved
    at once from the classes before it. Each class is the farthest from those before it.

    >>> spread(4, 2).tolist()
    [[0, 2, 8, 10], [5, 7, 13, 15], [1, 3, 9, 11], [4, 6, 12, 14]]
    """

    def apart(a: tuple[int, int], b: tuple[int, int]) -> int:
        gaps = [abs(i - j) for i, j in zip(a, b, strict=True)]
        return sum(min(g, spacing - g) ** 2 for g in gaps)

    chosen = [(0, 0)]
    rest = [(i, j) for i in range(spacing) for j in range(spacing) if i or j]
    while rest:
        chosen.append(max(rest, key=lambda c: min(apart(c, other) for other in chosen)))
        rest.remove(chosen[-1])
    sites = torch.arange(side**2).view(side, side)
    return torch.stack([sites[i::spacing, j::spacing].flatten() for i, j in chosen])


class LatticeMLP(nn.Module):
    """A network that is its own conditioner: theta of position t is a function of x_s, s < t, s in near[t].

    near: positions that each position may look at, [T, W], the same W directions for each.
    """

    near: Tensor
    before: Tensor

    def __init__(self, near: Tensor, params: int, hidden: tuple[int, ...], activation: Activation) -> None:
        super().__init__()
        before = near < torch.arange(len(near))[:, None]
        self.register_buffer("near", torch.where(before, near, 0), persistent=False)
        self.register_buffer("before", before, persistent=False)
        sizes = [2 * near.shape[1], *hidden]  # values of the W sites, and which of them come before
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(hidden[-1], params)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """theta [n, w, P] of positions at [w] or [n, w] from x [n, T]."""
        near, before = self.near[at], self.before[at]  # [..., w, W]
        if at.ndim == 1:
            values = x.index_select(1, near.flatten()).view(len(x), *near.shape)
        else:
            values = x.gather(1, near.flatten(1)).view(near.shape)
        first, *rest = self.linears
        of_values, of_before = first.weight.split(near.shape[-1], 1)  # type: ignore[operator]
        h = F.linear(torch.where(before, values, 0), of_values)
        h = h + F.linear(before.to(x), of_before, first.bias)  # type: ignore[arg-type]
        for linear in rest:
            h = linear(self.activation(h))
        return self.head(self.activation(h))  # type: ignore[no-any-return]

    # Conditioner

    def bind(self, condition: None) -> LatticeMLP:
        """The conditioner of any rows: it takes no context."""
        return self

    @property
    def length(self) -> int:
        return len(self.near)

    def select(self, rows: Tensor) -> LatticeMLP:
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.parameters())

    def new_cache(self, n: int) -> NoCache:
        return NoCache()

    def first(self, n: int) -> Tensor:
        return self.params(self.head.weight.new_zeros(n, self.length, 1), 0, 1, NoCache())

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        at = torch.as_tensor(start, device=x.device)[..., None] + torch.arange(width, device=x.device)
        return self(x[..., 0], at.clamp_max(self.length - 1))  # type: ignore[no-any-return]

    def all_params(self, x: Tensor) -> Tensor:
        return self.params(x, 0, self.length, NoCache())
