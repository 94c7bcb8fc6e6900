"""A causal transformer as a conditioner: windows of positions against a cache of keys and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.block import Affine, Cache, Start, TransformerLayer, TransformerNetwork, take
from jacobiflow.kernels.compile import COMPILED, StaticConditioner

EXPANSION = 4  # hidden units of the MLP per unit of width
QUERIES = 128  # of causal_attention at a time: keys after them are left out
EPS = 1e-5  # of LayerNorm: torch's default
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # layer, q, k, v [n, heads, s, head_dim] -> like q


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

    def forward(self, h: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """h [n, s, width]; `attend` says which positions a query sees."""
        n, s, w = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(n, s, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        h = h + self.proj(attend(q, k, v).transpose(1, 2).reshape(n, s, w))
        return h + self.down(F.gelu(self.up(self.norm2(h))))  # type: ignore[no-any-return]


class CausalTransformer(nn.Module):
    """`depth` layers over sequences of `length` positions."""

    def __init__(self, *, length: int, width: int, depth: int, head_dim: int = 64) -> None:
        super().__init__()
        self.length, self.width, self.head_dim = length, width, head_dim
        self.layers = nn.ModuleList(Layer(width, head_dim) for _ in range(depth))

    def forward(self, h: Tensor, attend: Attend) -> Tensor:
        """Outputs for h [n, s, width]."""
        for i, layer in enumerate(self.layers):
            h = layer(h, lambda q, k, v, i=i: attend(i, q, k, v))
        return h


@dataclass
class KVCache:
    """Keys and values [layers, n, heads, T, head_dim] of the inputs; zeros where none were read yet."""

    k: Tensor
    v: Tensor

    def select(self, rows: Tensor) -> KVCache:
        return KVCache(self.k[:, rows], self.v[:, rows])

    def zero_nonfinite(self) -> None:
        self.k.nan_to_num_(0, 0, 0)
        self.v.nan_to_num_(0, 0, 0)


@dataclass(frozen=True)
class TransformerConditioner:
    """theta_t from the transformer's output at input t - 1; that of position 0 is zero: the identity.

    A subclass with another position embedding overrides `place`.
    """

    weights: Any  # a `MemoModule` with proj_in, pos_embed (or None), net (a `CausalTransformer`) and proj_out
    condition: Tensor | None = None  # [n or 1, 1, width], added to the inputs
    temperature: Tensor | None = None  # [n or 1], attention logits are divided by it
    skip: int = 0  # how many of the nearest inputs, its own the first, a position does not attend to; for analysis

    @property
    def length(self) -> int:
        return self.weights.net.length  # type: ignore[no-any-return]

    def select(self, rows: Tensor) -> TransformerConditioner:
        def pick(t: Tensor | None) -> Tensor | None:
            return t if t is None or len(t) == 1 else t[rows]

        return replace(self, condition=pick(self.condition), temperature=pick(self.temperature))

    def tensors(self) -> tuple[Tensor, ...]:
        own = [p for name, p in self.weights.named_parameters() if name != "class_embed"]
        return (*own, *(() if self.condition is None else (self.condition,)))

    def new_cache(self, n: int) -> KVCache:
        net, like = self.weights.net, self.weights.proj_in.weight
        shape = (len(net.layers), n, net.width // net.head_dim, net.length, net.head_dim)
        return KVCache(like.new_zeros(shape), like.new_zeros(shape))

    def first(self, n: int) -> Tensor:
        out = self.weights.proj_out
        return out.weight.new_zeros(n, 1, out.out_features)  # type: ignore[no-any-return]

    def place(self, q: Tensor, k: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Queries, and keys as the cache holds them, [n, heads, s, head_dim] of inputs [s] or [n, s], from 0."""
        return q, k

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        assert isinstance(cache, KVCache)
        if isinstance(start, int):
            return self._outputs(x, start, width, self._in_order(start, width, cache))
        return self._outputs(x, start, width, self._scattered(start, width, cache))

    def all_params(self, x: Tensor) -> Tensor:
        first, rest = self.first(len(x)), x.shape[1] - 1
        return torch.cat((first, self._outputs(x, 1, rest, self._in_order(1, rest, None))), 1) if rest else first

    def describe(self) -> TransformerNetwork | None:
        """The network as plain data; None if any part of it is not exactly what this file defines."""
        w, net = self.weights, self.weights.net
        if self.skip or w.pos_embed is None or w.pos_embed.shape != (net.length, net.width) or not _standard(w):
            return None

        def pair(m: Any) -> Affine:
            return Affine(m.weight, m.bias)

        names = TransformerLayer._fields
        layers = tuple(TransformerLayer(*(pair(getattr(m, name)) for name in names)) for m in net.layers)
        shared = pair(w.proj_in), w.pos_embed, layers, pair(w.proj_out), net.head_dim, w.reuse
        return TransformerNetwork(*shared, self.condition, self.temperature)

    def _outputs(self, x: Tensor, start: Start, width: int, attend: Attend) -> Tensor:
        """theta [n, width, P] from inputs start - 1 .. start + width - 2; input T - 2 is repeated."""
        w, last = self.weights, x.shape[1] - 1
        h = w.proj_in(take(x[:, :last], start - 1, width))
        if w.pos_embed is not None:
            h = h + take(w.pos_embed[None, :last].expand(len(x), -1, -1), start - 1, width)
        h = h if self.condition is None else h + self.condition
        return w.proj_out(w.net(h, attend))  # type: ignore[no-any-return]

    def _in_order(self, start: int, width: int, cache: KVCache | None) -> Attend:
        """Attention of one window for all rows; without a cache it is the first window."""
        first, end, device = start - 1, start + width - 1, self.weights.proj_in.weight.device
        inputs, mask = torch.arange(first, end, device=device), None
        if self.skip or (first and width > 1):
            mask = torch.ones(width, end, dtype=torch.bool, device=device).tril_(first - self.skip)

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = self.place(q, k, inputs)
            if cache is not None:
                cache.k[i, :, :, first:end], cache.v[i, :, :, first:end] = k, v
                k, v = cache.k[i, :, :, :end], cache.v[i, :, :, :end]
            return self._attention(q, k, v, mask, causal=width > 1)

        return attend

    def _scattered(self, start: Tensor, width: int, cache: KVCache) -> Attend:
        """Attention of a window per row. Shapes depend on the number of rows and the width alone."""
        length = cache.k.shape[3]
        steps = torch.arange(width, device=start.device)
        inputs = (start[:, None] - 1 + steps).clamp_max(length - 2)
        mask = torch.arange(length, device=start.device) <= inputs[:, None, :, None] - self.skip  # [n, 1, width, T]

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            (q, k), slots = self.place(q, k, inputs), inputs[:, None, :, None].expand_as(k)
            keys, values = cache.k[i].scatter_(2, slots, k), cache.v[i].scatter_(2, slots, v)
            return self._attention(q, keys, values, mask, causal=False)

        return attend

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool) -> Tensor:
        if self.temperature is not None:
            q = q / self.temperature.view(-1, 1, 1, 1)
        if causal and mask is None and q.device.type == "cpu" and q.requires_grad:
            return causal_attention(q, k, v)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal and mask is None)
        return out if not self.skip or mask is None else torch.where(mask.any(-1, keepdim=True), out, 0)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of q, k, v [n, heads, T, head_dim]; torch's fused kernel trains more slowly on a CPU."""
    n, heads, length, dim = q.shape
    q, k, v = (t.reshape(n * heads, length, dim) for t in (q, k, v))
    found, like = [], q.new_full((QUERIES, length), -torch.inf)
    for first in range(0, length, QUERIES):
        end = min(first + QUERIES, length)
        mask = like[: end - first, :end].triu(first + 1).expand(n * heads, -1, -1)
        scores = torch.baddbmm(mask, q[:, first:end], k[:, :end].transpose(1, 2), alpha=dim**-0.5)
        found.append(torch.bmm(scores.softmax(-1), v[:, :end]))
    return torch.cat(found, 1).view(n, heads, length, dim)


def _plain(module: Any, kind: type[nn.Module], **settings: Any) -> bool:
    """Whether a call is `kind.forward` with these settings: no subclass, no forward of its own, no hook."""
    own = type(module) is kind and "forward" not in vars(module)
    hooked = module._forward_hooks or module._forward_pre_hooks
    return own and not hooked and all(getattr(module, name) == value for name, value in settings.items())


def _standard(w: Any) -> bool:
    """Whether every part of these weights is plain, with the usual settings."""
    net, heads = w.net, {"heads": w.net.width // w.net.head_dim, "head_dim": w.net.head_dim}
    if not (_plain(net, CausalTransformer) and len(net.layers) and all(_plain(m, Layer, **heads) for m in net.layers)):
        return False
    linears = [w.proj_in, w.proj_out, *(linear for m in net.layers for linear in (m.qkv, m.proj, m.up, m.down))]
    norms = [norm for m in net.layers for norm in (m.norm1, m.norm2)]
    known = all(_plain(m, nn.LayerNorm, eps=EPS, normalized_shape=(net.width,)) for m in norms)
    return known and all(_plain(m, nn.Linear) for m in linears) and all(m.bias is not None for m in linears + norms)


# Each number of skipped inputs would be compiled again.
COMPILED[TransformerConditioner] = lambda own: None if own.skip else StaticConditioner(own)
