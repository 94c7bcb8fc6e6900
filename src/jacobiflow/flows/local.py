"""A local conditioner: one small network with the same weights at every site of a lattice.

A site's parameters depend on the sites near it that come before it, and on which of them do. Nothing needs
a cache: a window of positions costs its share of a forward pass, width 1 one forward pass in all.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    down, right = (d.flatten() for d in torch.meshgrid(step, step, indexing="ij"))
    others = (down != 0) | (right != 0)
    row, column = (
        torch.arange(side**2)[:, None].div(side, rounding_mode="floor"),
        torch.arange(side**2) % side,
    )
    return (row + down[others]) % side * side + (column[:, None] + right[others]) % side


def spread(side: int, spacing: int) -> Tensor:
    """The sites of a side x side torus in spacing^2 classes, [spacing^2, side^2 / spacing^2].

    Sites of one class are `spacing` apart, so that none is within reach of another if reach < spacing: given
    the classes before it, a class is solved at once. Each class is the farthest from those before it.

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


class LocalMLP(nn.Module):
    """Parameters [n, T, P] of T positions, those of position t a function of x_s, s < t, s in near[t].

    near: positions that each position may look at, [T, W], the same W directions for each.
    """

    near: Tensor
    seen: Tensor

    def __init__(self, near: Tensor, params: int, hidden: tuple[int, ...], activation: Activation) -> None:
        super().__init__()
        seen = near < torch.arange(len(near))[:, None]
        self.register_buffer("near", torch.where(seen, near, 0), persistent=False)
        self.register_buffer("seen", seen, persistent=False)
        sizes = [2 * near.shape[1], *hidden]  # what is near, and whether it is there
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.head = nn.Linear(hidden[-1], params)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """theta [n, w, P] of positions at [w] or [n, w] from x [n, T]."""
        near, seen = self.near[at], self.seen[at]  # [..., w, W]
        width = near.shape[-1]
        if at.ndim == 1:
            found = x.index_select(1, near.flatten()).view(len(x), *near.shape)
        else:
            found = x.gather(1, near.flatten(1)).view(near.shape)
        first, *rest = self.linears
        weight = first.weight
        there = F.linear(seen.to(x), weight[:, width:], first.bias)  # type: ignore[index, arg-type]
        h = F.linear(torch.where(seen, found, 0), weight[:, :width]) + there  # type: ignore[index]
        for linear in rest:
            h = linear(self.activation(h))
        return self.head(self.activation(h))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LocalConditioner:
    """A local network: a window costs its share of a forward pass, so that nothing needs a cache."""

    net: LocalMLP

    @property
    def length(self) -> int:
        return len(self.net.near)

    def select(self, rows: Tensor) -> LocalConditioner:
        return self

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.net.parameters())

    def new_cache(self, n: int) -> NoCache:
        return NoCache()

    def first(self, n: int) -> Tensor:
        like = self.net.head.weight
        zeros = like.new_zeros(n, self.length)
        return self.net(zeros, torch.zeros(1, dtype=torch.long, device=like.device))  # type: ignore[no-any-return]

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        at = torch.as_tensor(start, device=x.device)[..., None] + torch.arange(width, device=x.device)
        return self.net(x[..., 0], at.clamp_max(self.length - 1))  # type: ignore[no-any-return]

    def all_params(self, x: Tensor) -> Tensor:
        return self.net(x[..., 0], torch.arange(self.length, device=x.device))  # type: ignore[no-any-return]
