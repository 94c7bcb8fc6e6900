"""Block: a conditioner, an elementwise map and an order. What decoders solve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from jacobiflow.core.bijectors import Bijector

if TYPE_CHECKING:
    from jacobiflow.core.method import Method
    from jacobiflow.core.rows import Rows, Verdict, Window

Start = int | Tensor  # the first position of a window: one for all rows, or one per row [n]
Guess = tuple[Tensor, Tensor]  # a calibrated first guess mean_t + slope_t z_t: mean and slope [T, D]


class Cache(Protocol):
    """What a conditioner keeps of the inputs that it has read, for a fixed set of rows."""

    def select(self, rows: Tensor) -> Cache: ...  # a copy of these rows
    def zero_nonfinite(self) -> None: ...  # zeros for what overflowed: 0 * NaN is NaN, also beyond a window


class NoCache:
    """The cache of a conditioner that keeps nothing."""

    def select(self, rows: Tensor) -> NoCache:
        return self

    def zero_nonfinite(self) -> None: ...


class Conditioner(Protocol):
    """theta_t, a function of x_{<t}, for rows whose labels or context are bound; positions in the order it reads them.

    A method `describe` tells backends its network, as a `BoundNetwork` or a `TransformerNetwork`.
    """

    @property
    def length(self) -> int: ...  # positions T per row
    def select(self, rows: Tensor) -> Conditioner: ...  # the same one, bound to these rows
    def tensors(self) -> tuple[Tensor, ...]: ...  # weights and what was bound: all that gradients may flow to
    def new_cache(self, n: int) -> Cache: ...  # an empty one for n rows
    def first(self, n: int) -> Tensor: ...  # theta [n, 1, P] of position 0, which reads no other position
    def all_params(self, x: Tensor) -> Tensor: ...  # theta [n, T, P], without a cache; differentiable

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        """theta [n, width, P] of positions start_i .. start_i + width - 1, from x [n, T, D].

        1 <= start_i < T, and x is finite. Reads the inputs x[i, start_i - 1 : start_i + width - 1] and the cache
        entries of those before, and writes the entries of the inputs it reads. Positions beyond T - 1 are
        padding, which one start for all rows has not: it repeats input T - 2, and its theta means nothing.
        """


@dataclass(frozen=True, eq=False)
class Stage:
    """One masked linear map: node `source`, activated or not, to a new node, plus node `skip`."""

    weight: Tensor  # [out, in], masked
    bias: Tensor  # [out, 1]
    source: int
    activated: bool
    skip: int | None
    ends: tuple[int, ...]  # ends[d]: how many of the new node's units have degree <= d
    norm: tuple[Tensor, Tensor] | None = None  # [out, 1] each: activation sees factor * node + offset


@dataclass(frozen=True, eq=False)
class MaskedNetwork:
    """A masked network, its units sorted by degree. Node 0 is the input, node i the output of stage i - 1.

    A unit of degree d sees positions 0 .. d - 1 only; parameters of position t see units of degree t or less.
    """

    length: int
    stages: tuple[Stage, ...]  # of the hidden units
    head: Tensor  # [T * P, units], rows position by position
    head_bias: Tensor  # [T * P, 1]
    activation: Callable[[Tensor], Tensor]
    head_activated: bool = True  # whether the head reads the last node after its activation

    @property
    def params(self) -> int:
        return len(self.head) // self.length


@dataclass(frozen=True, eq=False)
class BoundNetwork:
    """The description of a conditioner: its network, and what context adds to its stages."""

    network: MaskedNetwork
    terms: Mapping[int, Tensor] = field(default_factory=dict)  # by number of the stage, [units, n or 1]


class Affine(NamedTuple):
    """x weight^T + bias of a linear layer, weight [out, in]; x weight + bias of a norm, both [width]."""

    weight: Tensor
    bias: Tensor


class TransformerLayer(NamedTuple):
    """h + proj(attention(qkv(norm1(h)))), then h + down(gelu(up(norm2(h))))."""

    norm1: Affine
    qkv: Affine  # [q, k, v], each head by head
    proj: Affine
    norm2: Affine
    up: Affine
    down: Affine


@dataclass(frozen=True)
class TransformerNetwork:
    """A causal transformer, with what is bound to its rows. LayerNorms have eps 1e-5, gelu is the exact one.

    Input t is proj_in(x_t) + pos_embed[t] + condition; proj_out of output t - 1 is theta of position t.
    """

    proj_in: Affine
    pos_embed: Tensor  # [T, width]
    layers: tuple[TransformerLayer, ...]
    proj_out: Affine
    head_dim: int
    reuse: Callable[[Callable[[], Any]], Any]  # keeps what is made of the weights until they change
    condition: Tensor | None = None  # [rows or 1, 1, width]
    temperature: Tensor | None = None  # [rows or 1], attention logits are divided by it
    blend: Tensor | None = None  # [T, P]: w of theta + w (theta - null), the rows of `null` being the second half


@dataclass(frozen=True)
class WrappedConditioner:
    """A conditioner around another one. A subclass defines `params` and `all_params`."""

    inner: Conditioner

    @property
    def length(self) -> int:
        return self.inner.length

    def select(self, rows: Tensor) -> Self:
        return replace(self, inner=self.inner.select(rows))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.inner.tensors()

    def new_cache(self, n: int) -> Cache:
        return self.inner.new_cache(n)

    def first(self, n: int) -> Tensor:
        return self.inner.first(n)


class Engine(Protocol):
    """How a conditioner and a bijector are evaluated while decoding. A backend subclasses it, one per bound block."""

    name: str  # of the backend
    rows: int | None = None  # that are best solved at once, for the sake of the processor's caches; None: all of them
    compacts: bool = True  # solved rows leave the batch; False where another number of rows costs more than they do

    def select(self, rows: Tensor) -> Engine: ...  # the same engine for these rows
    def new_cache(self, n: int) -> Cache: ...  # as `Conditioner.new_cache`
    def first(self, x: Tensor, cache: Cache | None) -> Tensor: ...  # as `Conditioner.first`, for the rows of x
    def params(self, x: Tensor, start: Start, width: int, cache: Cache | None) -> Tensor:
        """As `Conditioner.params`; without a cache all inputs are evaluated again."""

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]: ...  # as `Bijector.inverse`
    def accept(self, rows: Rows, window: Window, new: Tensor, log_slope: Tensor, method: Method) -> Verdict:
        """As `jacobiflow.core.rows.accept`."""

    def rough(self) -> Engine | None:
        """The same engine with products in bfloat16, for first guesses; None where it would not be faster."""
        return None

    def solve(self, x: Tensor, z: Tensor, log_slope: Tensor, start: int, stop: int, cache: Cache | None) -> None:
        """Positions start .. stop - 1 of x [n, T, D], one after the other, and their log |dx/dz| [n, T].

        Both are written in place. x below `start` is final, and the cache holds the inputs below start - 1;
        afterwards it holds those below stop - 1.
        """
        for t in range(start, stop):
            theta = self.params(x, t, 1, cache) if t else self.first(x, cache)
            if theta.dtype != z.dtype and not torch.is_autocast_enabled(z.device.type):
                raise ValueError(f"z is {z.dtype}, the network {theta.dtype}: use z.to({theta.dtype})")
            new, slope = self.inverse(z[:, t : t + 1], theta)
            x[:, t : t + 1], log_slope[:, t] = new, slope.sum((1, 2))


@dataclass(frozen=True)
class Block:
    """z_t = f(x_t; theta_t), theta_t a function of x_{<t}; bound to rows and a backend. x and z are in data order."""

    conditioner: Conditioner
    bijector: Bijector
    engine: Engine
    order: Tensor | None = None  # the index in the data of each position; None is the natural order
    guess: Guess | None = None  # in the order of positions

    @property
    def length(self) -> int:
        return self.conditioner.length

    def select(self, rows: Tensor) -> Block:
        return replace(self, conditioner=self.conditioner.select(rows), engine=self.engine.select(rows))

    def to_positions(self, x: Tensor) -> Tensor:
        """A sequence [n, T, ...] of the data, in the order of positions."""
        return x if self.order is None else x[:, self.order]

    def from_positions(self, x: Tensor) -> Tensor:
        """A sequence in the order of positions, in the order of the data."""
        return x if self.order is None else torch.zeros_like(x).index_copy(1, self.order, x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """z = f(x; theta(x)) [n, T, D] and log |dz/dx| [n]; differentiable."""
        x = self.to_positions(x)
        z, log_slope = self.bijector.forward(x, self.conditioner.all_params(x))
        return self.from_positions(z), log_slope.flatten(1).sum(1)

    def sweep(self, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """One sweep over all positions: f^-1(z; theta(x)) [n, T, D] and log |dx/dz| [n]; differentiable."""
        theta = self.conditioner.all_params(self.to_positions(x))
        new, log_slope = self.bijector.inverse(self.to_positions(z), theta)
        return self.from_positions(new), log_slope.flatten(1).sum(1)


def take(t: Tensor, start: Start, width: int) -> Tensor:
    """t[i, start_i : start_i + width] of [n, T, ...]; the last position is repeated beyond the end."""
    if isinstance(start, int):
        return t[:, start : start + width]
    at = (start[:, None] + torch.arange(width, device=t.device)).clamp_max(t.shape[1] - 1)
    return t.gather(1, at.view(*at.shape, *[1] * (t.ndim - 2)).expand(*at.shape, *t.shape[2:]))
