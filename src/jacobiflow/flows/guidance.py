"""Guidance: parameters pushed away from those of an uninformed twin. A guided block is a Block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from jacobiflow.core.types import Block, Cache
from jacobiflow.flows.arguments import number

LARGEST = 1e6  # of weights and temperatures: float32 makes infinities of them long before they end


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """theta + w (theta - theta_null), on a, on b or on both.

    weight: w; 0 is none.
    annealed: w grows linearly along the sequence: w t / (T - 1) for position t.
    what: which parameters are pushed: "a" (log-scale), "b" (shift) or "ab".
    attn_temp: the twin divides its attention logits by this. An unconditional model has no
        label to drop, so it needs a value other than 1 for guidance to do anything.
    """

    weight: float = 0.0
    annealed: bool = False
    what: Literal["a", "b", "ab"] = "ab"
    attn_temp: float = 1.0

    def __post_init__(self) -> None:
        if abs(number("Guidance.weight", self.weight)) > LARGEST:
            raise ValueError(f"Guidance.weight must be within +-{LARGEST:g}, not {self.weight}")
        if self.what not in ("a", "b", "ab"):
            raise ValueError(f"Guidance.what must be 'a', 'b' or 'ab', not {self.what!r}")
        if not number("Guidance.attn_temp", self.attn_temp) > 0:
            raise ValueError(f"Guidance.attn_temp must be finite and positive, not {self.attn_temp}")
        if not 1 / LARGEST <= self.attn_temp <= LARGEST:
            raise ValueError(f"Guidance.attn_temp must be from {1 / LARGEST:g} to {LARGEST:g}")


@dataclass
class PairCache:
    """The caches of a block and of its twin."""

    block: Cache
    null: Cache

    @property
    def valid(self) -> int:
        return min(self.block.valid, self.null.valid)

    @valid.setter
    def valid(self, value: int) -> None:
        self.block.valid = self.null.valid = value

    def select(self, rows: Tensor) -> PairCache:
        return PairCache(self.block.select(rows), self.null.select(rows))


@dataclass(frozen=True)
class GuidedBlock:
    """A block and its uninformed twin, blended."""

    block: Block
    null: Block
    guidance: Guidance

    @property
    def length(self) -> int:
        return self.block.length

    @property
    def rows(self) -> int | None:
        return self.block.rows and max(1, self.block.rows // 2)  # two caches

    def select(self, rows: Tensor) -> GuidedBlock:
        return GuidedBlock(self.block.select(rows), self.null.select(rows), self.guidance)

    def tensors(self) -> tuple[Tensor, ...]:
        found = {id(t): t for t in (*self.block.tensors(), *self.null.tensors())}
        return tuple(found.values())

    def new_cache(self, n: int) -> PairCache:
        return PairCache(self.block.new_cache(n), self.null.new_cache(n))

    def params(self, x: Tensor, lo: int, hi: int, cache: Cache | None = None) -> Tensor:
        pair = cache if isinstance(cache, PairCache) else None
        theta = self.block.params(x, lo, hi, pair and pair.block)
        null = self.null.params(x, lo, hi, pair and pair.null)
        return theta + self._weight(lo, hi, x.shape[-1], theta) * (theta - null)

    def _weight(self, lo: int, hi: int, dim: int, like: Tensor) -> Tensor:
        """w for each position and parameter [hi - lo or 1, P]."""
        weight = like.new_full((1, like.shape[-1]), self.guidance.weight)
        if like.shape[-1] > dim:  # (a, b); a volume-preserving block has b alone
            if self.guidance.what == "a":
                weight[:, dim:] = 0
            elif self.guidance.what == "b":
                weight[:, :dim] = 0
        elif self.guidance.what == "a":
            weight.zero_()
        if self.guidance.annealed:
            t = torch.arange(lo, hi, dtype=like.dtype, device=like.device)
            weight = weight * (t / max(self.length - 1, 1))[:, None]
        return weight

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.forward(x, theta)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.inverse(z, theta)
