"""Networks as plain data: what backends match, and what they are packed from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


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
        """Parameters P per position."""
        return len(self.head) // self.length


@dataclass(frozen=True, eq=False)
class BoundNetwork:
    """The description of a conditioner: its network, and what context adds to its stages.

    terms: by number of the stage, [units, n or 1].
    """

    network: MaskedNetwork
    terms: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Linear:
    """x weight^T + bias. weight: [out, in], bias: [out]."""

    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class TransformerLayer:
    """h + proj(attention(qkv(norm1(h)))), then h + down(gelu(up(norm2(h)))); norms are (scale, shift)."""

    norm1: tuple[Tensor, Tensor]
    qkv: Linear  # [q, k, v], each head by head
    proj: Linear
    norm2: tuple[Tensor, Tensor]
    up: Linear
    down: Linear


@dataclass(frozen=True)
class TransformerNetwork:
    """A causal transformer, with what is bound to its rows. LayerNorms have eps 1e-5, gelu is the exact one.

    Input t is proj_in(x_t) + pos_embed[t] + condition; proj_out of output t - 1 is theta of position t.
    """

    proj_in: Linear
    pos_embed: Tensor  # [T, width]
    layers: tuple[TransformerLayer, ...]
    proj_out: Linear
    head_dim: int
    reuse: Callable[[Callable[[], Any]], Any]  # keeps what is made of the weights until they change
    condition: Tensor | None = None  # [rows or 1, 1, width]
    temperature: Tensor | None = None  # [rows or 1], attention logits are divided by it
    blend: Tensor | None = (
        None  # [T, P]: w of theta + w (theta - null), the rows of `null` being the second half
    )
