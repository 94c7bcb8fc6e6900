"""`compile=True`: a transformer block whose decode step and sweep are compiled by torch, with static shapes.

Where a stretch of positions begins is a number in a tensor, keys and values beyond each query are masked, and
stretches come in few lengths: one position, the whole sequence, powers of two between. So a shape is compiled
once and serves every position and every block; on CUDA it is captured as a CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.core.types import Cache
from jacobiflow.flows.transformer import KVCache


def options(device: str) -> dict[str, Any]:
    """How torch compiles for a kind of device; "reduce-overhead" is CUDA graphs."""
    return {"mode": "reduce-overhead"} if device == "cuda" else {}


def evaluate(
    weights: Any, x: Tensor, first: Tensor, condition: Tensor | None, k: Tensor, v: Tensor, scale: Tensor
) -> Tensor:
    """Parameters [n, s, P] after each of the inputs x [n, s, D] at positions first, first + 1, ...

    k, v: [layers, n, heads, T, head_dim], written at these positions.
    """
    n, s, _ = x.shape
    places = first + torch.arange(s, device=x.device)
    h = weights.proj_in(x) + weights.pos_embed[places]
    if condition is not None:
        h = h + condition
    seen = torch.arange(k.shape[3], device=x.device) <= places[:, None]  # [s, T]
    for i, layer in enumerate(weights.net.layers):
        qkv = layer.qkv(layer.norm1(h)).view(n, s, 3, layer.heads, layer.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        k[i].index_copy_(2, places, key)
        v[i].index_copy_(2, places, value)
        out = F.scaled_dot_product_attention(query * scale, k[i], v[i], attn_mask=seen, scale=1.0)
        h = h + layer.proj(out.transpose(1, 2).reshape(n, s, -1))
        h = h + layer.down(F.gelu(layer.up(layer.norm2(h))))
    return weights.proj_out(h)  # type: ignore[no-any-return]


@cache
def compiled(device: str, rows: int, size: int) -> Callable[..., Tensor]:
    """`evaluate`, compiled for a kind of device and one shape.

    Each has code of its own: torch counts compilations of one code object, and gives up at the eighth.
    """
    own = FunctionType(evaluate.__code__.replace(), evaluate.__globals__, f"evaluate_{rows}_{size}")
    return torch.compile(own, dynamic=False, fullgraph=True, **options(device))


def stretch(count: int, most: int) -> int:
    """The length that `count` positions are evaluated in.

    >>> [stretch(s, 48) for s in (1, 2, 3, 17, 33, 48)]
    [1, 2, 4, 32, 48, 48]
    """
    return min(1 << (count - 1).bit_length(), most)


class _StaticCache(KVCache):
    """Keys and values that are all looked at, those that do not count through a mask: they must be finite."""

    def select(self, rows: Tensor) -> KVCache:
        fewer = super().select(rows)
        fewer.k[..., self.valid :, :] = fewer.v[..., self.valid :, :] = 0
        return _StaticCache(fewer.k, fewer.v, fewer.valid)


@dataclass(frozen=True)
class CompiledBlock:
    """A bound transformer block whose parameters come from the compiled function; else as that block."""

    block: Any  # a BoundPatchBlock

    @property
    def length(self) -> int:
        return self.block.length  # type: ignore[no-any-return]

    @property
    def rows(self) -> int | None:
        return None  # parts of other sizes would be compiled again

    def select(self, rows: Tensor) -> CompiledBlock:
        return replace(self, block=self.block.select(rows))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.block.tensors()  # type: ignore[no-any-return]

    def new_cache(self, n: int) -> KVCache:
        like = self.block.weights.pos_embed
        empty: KVCache = self.block.weights.net.new_cache(n, dtype=like.dtype, device=like.device)
        return _StaticCache(empty.k.zero_(), empty.v.zero_())

    def params(self, x: Tensor, lo: int, hi: int, cache: Cache | None = None) -> Tensor:
        if torch.is_grad_enabled():
            return self.block.params(x, lo, hi, None)  # type: ignore[no-any-return]
        weights = self.block.weights
        head = x.new_zeros(len(x), 1, weights.proj_out.out_features) if lo == 0 else None
        if hi == 1:
            assert head is not None
            return head
        kept = cache if isinstance(cache, KVCache) else self.new_cache(len(x))
        need = max(lo - 1, 0)
        first = min(kept.valid, need)
        size = stretch(hi - 1 - first, self.length - 1)
        begin = max(hi - 1 - size, 0)  # settled positions come out as they were
        scale = 1.0 / (math.sqrt(weights.net.head_dim) * self.block.attn_temp)
        theta = compiled(
            x.device.type, len(x), size
        )(
            weights,
            _finite(x[:, begin : begin + size], hi - 1 - begin),
            torch.tensor(begin, device=x.device),
            self.block.condition,
            kept.k,
            kept.v,
            torch.tensor(scale, dtype=x.dtype, device=x.device),  # a number would be part of the code
        )[:, need - begin : hi - 1 - begin]
        kept.valid = hi - 1
        return torch.cat((head, theta), 1) if head is not None else theta.clone()

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.forward(x, theta)  # type: ignore[no-any-return]

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.block.inverse(z, theta)  # type: ignore[no-any-return]


def _finite(x: Tensor, count: int) -> Tensor:
    """The first `count` positions of a stretch, which may be longer: zeros beyond, whatever stood there."""
    return x.contiguous() if count >= x.shape[1] else F.pad(x[:, :count], (0, 0, 0, x.shape[1] - count))
