"""Guidance: parameters pushed away from those of an uninformed branch. A conditioner around another one."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from jacobiflow.core.arguments import Labels, number, set_fields, switch, word
from jacobiflow.core.bijectors import description
from jacobiflow.core.block import Cache, Start, TransformerNetwork, WrappedConditioner
from jacobiflow.kernels.compile import COMPILED, compiled

IDLE = "give labels, or another temperature such as jf.Guidance(1.5, attn_temp=1.5)"
LARGEST = 1e6  # of weights and temperatures: float32 overflows long before they end


@dataclass(frozen=True)
class Guidance:
    """theta + w (theta - theta_null), on a, on b or on both.

    weight: w; 0 is none. annealed: w grows along the sequence: w t / (T - 1) for position t.
    what: which parameters are pushed: "a" (log-scale), "b" (shift) or "ab".
    attn_temp: the uninformed branch divides its attention logits by this; without labels it must not be 1.
    """

    weight: float = 0.0
    _: KW_ONLY
    annealed: bool = False
    what: Literal["a", "b", "ab"] = "ab"
    attn_temp: float = 1.0

    def __post_init__(self) -> None:
        set_fields(self, "Guidance", number, "weight", "attn_temp")
        set_fields(self, "Guidance", switch, "annealed")
        word("Guidance.what", self.what, ("a", "b", "ab"))
        if abs(self.weight) > LARGEST:
            raise ValueError(f"Guidance.weight must be within +-{LARGEST:g}, not {self.weight}")
        if not 1 / LARGEST <= self.attn_temp <= LARGEST:
            raise ValueError(f"Guidance.attn_temp must be from {1 / LARGEST:g} to {LARGEST:g}, not {self.attn_temp}")

    @classmethod
    def of(cls, value: float | Guidance) -> Guidance:
        """The `guidance` argument of a flow, which may be a weight."""
        return value if isinstance(value, Guidance) else cls(value)

    def refuse_idle(self, labels: Labels | None, fix: str = IDLE) -> None:
        """Raise if it changes nothing: without a weight, or because both branches are the same."""
        if not self.weight and self != Guidance(self.weight):
            raise ValueError("guidance of weight 0 changes nothing: give a weight such as jf.Guidance(1.5, ...)")
        unlabelled = labels is None or (np.ndim(labels) == 0 and labels == -1)
        if unlabelled and self.weight and self.attn_temp == 1:
            raise ValueError(f"guidance without labels changes nothing at attn_temp 1: {fix}")


@dataclass(frozen=True)
class PairCache:
    """The cache of both branches."""

    both: Cache
    n: int

    def select(self, rows: Tensor) -> PairCache:
        return PairCache(self.both.select(_pairs(rows, self.n)), len(rows))

    def zero_nonfinite(self) -> None:
        self.both.zero_nonfinite()


@dataclass(frozen=True)
class Guided(WrappedConditioner):
    """A conditioner of 2 n rows, the informed ones first, evaluated as one batch and blended."""

    n: int
    dim: int  # numbers per position
    guidance: Guidance

    def select(self, rows: Tensor) -> Guided:
        return replace(self, inner=self.inner.select(_pairs(rows, self.n)), n=len(rows))

    def new_cache(self, n: int) -> PairCache:
        return PairCache(self.inner.new_cache(2 * n), n)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        assert isinstance(cache, PairCache)
        starts = start if isinstance(start, int) else torch.cat((start, start))
        theta = self.inner.params(torch.cat((x, x)), starts, width, cache.both)
        first = torch.as_tensor(start, device=x.device)[..., None]
        return self._blend(theta, first + torch.arange(width, device=x.device))

    def all_params(self, x: Tensor) -> Tensor:
        return self._blend(self.inner.all_params(torch.cat((x, x))), torch.arange(self.length, device=x.device))

    def describe(self) -> TransformerNetwork | None:
        network = description(self.inner)
        if not isinstance(network, TransformerNetwork):
            return None
        like = network.proj_out.bias.detach()
        weights = self.weights(torch.arange(self.length, device=like.device), like)
        return replace(network, blend=weights.expand(self.length, -1))

    def _blend(self, both: Tensor, t: Tensor) -> Tensor:
        """theta + w (theta - null) at positions t [w] or [n, w]."""
        theta, null = both.chunk(2)
        return theta + self.weights(t, theta) * (theta - null)

    def weights(self, t: Tensor, like: Tensor) -> Tensor:
        """w per parameter, for positions t [w] or [n, w]: [..., P], broadcast over rows."""
        weight = like.new_full((like.shape[-1],), self.guidance.weight)
        shifts = len(weight) - self.dim  # b begins there; a volume-preserving block has no a
        weight[:shifts] *= "a" in self.guidance.what
        weight[shifts:] *= "b" in self.guidance.what
        if self.guidance.annealed:
            return weight * (t.to(like.dtype) / max(self.length - 1, 1))[..., None]
        return weight


def _pairs(rows: Tensor, n: int) -> Tensor:
    return torch.cat((rows, rows + n))


# The inner one alone: the weight is a number, which would be part of compiled code.
COMPILED[Guided] = lambda own: None if (inner := compiled(own.inner)) is None else replace(own, inner=inner)
