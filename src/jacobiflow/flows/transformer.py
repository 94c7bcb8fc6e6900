"""A causal transformer that evaluates any stretch of positions against a static cache."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPANSION = 4  # hidden units of the MLP for each number of width


@dataclass
class KVCache:
    """Keys and values of every layer, allocated once and written in place.

    k, v: [layers, n, heads, T, head_dim]; the first `valid` positions hold.
    """

    k: Tensor
    v: Tensor
    valid: int = 0

    def select(self, rows: Tensor) -> KVCache:
        """These rows in a cache of their own; only the valid part is copied."""
        layers, _, heads, length, dim = self.k.shape
        k = self.k.new_empty(layers, len(rows), heads, length, dim)
        v = torch.empty_like(k)
        if self.valid:
            k[..., : self.valid, :] = self.k[:, rows, :, : self.valid]
            v[..., : self.valid, :] = self.v[:, rows, :, : self.valid]
        return KVCache(k, v, self.valid)


class Layer(nn.Module):
    """Pre-norm attention and MLP, both residual."""

    def __init__(self, width: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.head_dim = width // head_dim, head_dim
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, EXPANSION * width)
        self.down = nn.Linear(EXPANSION * width, width)

    def attend(
        self, h: Tensor, first: int, temperature: float, kv: tuple[Tensor, Tensor] | None, skip: int
    ) -> Tensor:
        """Attention of positions first, first + 1, ... over all positions up to each, but for the `skip`
        nearest of them, itself the first; over none at all it is zero."""
        n, s, w = h.shape
        qkv = self.qkv(self.norm1(h)).view(n, s, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [n, heads, s, head_dim]
        if kv is not None:
            keys, values = kv
            keys[:, :, first : first + s] = k
            values[:, :, first : first + s] = v
            k, v = keys[:, :, : first + s], values[:, :, : first + s]
        mask = None
        if skip or (first and s > 1):
            mask = torch.ones(s, first + s, dtype=torch.bool, device=h.device).tril_(first - skip)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and s > 1,
            scale=1.0 / (math.sqrt(self.head_dim) * temperature),
        )
        if skip > first:
            out = torch.where(mask.any(1, keepdim=True), out, 0)  # type: ignore[union-attr]
        return self.proj(out.transpose(1, 2).reshape(n, s, w))  # type: ignore[no-any-return]

    def forward(
        self, h: Tensor, first: int, temperature: float, kv: tuple[Tensor, Tensor] | None, skip: int
    ) -> Tensor:
        h = h + self.attend(h, first, temperature, kv, skip)
        return h + self.down(F.gelu(self.up(self.norm2(h))))  # type: ignore[no-any-return]


class CausalTransformer(nn.Module):
    """`depth` layers over a sequence of at most `length` positions.

    >>> net = CausalTransformer(length=5, width=8, depth=2, head_dim=4)
    >>> h = torch.randn(3, 5, 8)
    >>> cache = net.new_cache(3, dtype=h.dtype, device=h.device)
    >>> left = net(h[:, :2], cache=cache)
    >>> right = net(h[:, 2:], cache=cache)
    >>> torch.allclose(torch.cat((left, right), 1), net(h), atol=1e-5)
    True
    """

    def __init__(self, *, length: int, width: int, depth: int, head_dim: int = 64) -> None:
        super().__init__()
        self.length, self.width, self.head_dim = length, width, head_dim
        self.layers = nn.ModuleList(Layer(width, head_dim) for _ in range(depth))

    def new_cache(self, n: int, *, dtype: torch.dtype, device: torch.device) -> KVCache:
        """An empty cache for n rows."""
        shape = (len(self.layers), n, self.width // self.head_dim, self.length, self.head_dim)
        k = torch.empty(shape, dtype=dtype, device=device)
        return KVCache(k, torch.empty_like(k))

    def forward(
        self, h: Tensor, *, cache: KVCache | None = None, temperature: float = 1.0, skip: int = 0
    ) -> Tensor:
        """Outputs for h [n, s, width], the positions that follow the cache's valid ones.

        skip: how many of the nearest positions, its own the first, a position does not attend to.
        """
        first = cache.valid if cache is not None else 0
        for i, layer in enumerate(self.layers):
            h = layer(h, first, temperature, None if cache is None else (cache.k[i], cache.v[i]), skip)
        if cache is not None:
            cache.valid = first + h.shape[1]
        return h
