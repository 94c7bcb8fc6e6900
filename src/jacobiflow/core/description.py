"""Descriptions: the plain data by which a backend recognizes what it may evaluate in its own way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Formula:
    """The description of a bijector: the name of its formula and the numbers in it, without theta."""

    kind: str
    numbers: tuple[float, ...] = ()


def description(thing: object) -> object | None:
    """What `thing.describe()` returns, if the class of `thing` itself defines that method; else None.

    Bijectors return a `Formula`, conditioners a `BoundNetwork` or a `TransformerNetwork`. The method is not inherited:
    a subclass may compute something else, so it runs in torch until it describes itself.
    """
    describe = vars(type(thing)).get("describe")
    return None if describe is None else describe(thing)


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
