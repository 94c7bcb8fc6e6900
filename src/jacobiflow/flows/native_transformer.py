"""The compiled transformer: a `PatchBlock`'s weights as it takes them, and its cache."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_long, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.native import PANEL, Kept, pad, panels, threads


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in ("qkv", "qkv_bias", "proj", "proj_bias", "up", "up_bias", "down", "down_bias")
    ]


class _Net(ctypes.Structure):
    _fields_ = [
        *((n, c_long) for n in ("length", "dim", "width", "heads", "head_dim", "hidden", "depth", "params")),
        *((name, c_void_p) for name in ("input", "embed", "output", "output_bias", "layers")),
    ]


@dataclass
class NativeCache:
    """Keys and values [layers, n, heads, T, head_dim], the last padded, and room to work in."""

    net: NativeNet
    k: Tensor
    v: Tensor
    scratch: Tensor
    valid: int = 0

    def select(self, rows: Tensor) -> NativeCache:
        """These rows in a cache of their own; only the valid part is copied."""
        shape = list(self.k.shape)
        shape[1] = len(rows)
        k, v = self.k.new_empty(shape), self.v.new_empty(shape)
        if self.valid:
            k[..., : self.valid, :] = self.k[:, rows, :, : self.valid]
            v[..., : self.valid, :] = self.v[:, rows, :, : self.valid]
        return NativeCache(self.net, k, v, self.scratch, self.valid)

    def reserve(self, size: int) -> int:
        """The address of room for so many numbers."""
        if len(self.scratch) < size:
            self.scratch = self.k.new_empty(size)
        return self.scratch.data_ptr()


class NativeNet:
    """The weights of a `PatchBlock` as the compiled functions take them."""

    def __init__(self, lib: ctypes.CDLL, block: Any) -> None:
        self.lib = lib
        self.keep = Kept()
        net = block.net
        heads, head_dim = net.width // net.head_dim, net.head_dim
        self.layers = (_Layer * len(net.layers))(*(self._layer(w, heads, head_dim) for w in net.layers))
        self.shape = (len(net.layers), heads, net.length, head_dim + -head_dim % PANEL)
        self.params, self.head_dim = block.proj_out.out_features, head_dim
        self.net = _Net(
            *(net.length, block.proj_in.in_features, net.width, heads, head_dim),
            *(net.layers[0].up.out_features, len(net.layers), self.params),
            self.keep(panels(block.proj_in.weight.T)),
            self.keep(block.pos_embed + block.proj_in.bias),
            *self._linear(block.proj_out.weight.T, block.proj_out.bias),
            ctypes.cast(self.layers, c_void_p),
        )
        self.address = ctypes.addressof(self.net)

    def _layer(self, w: Any, heads: int, head_dim: int) -> _Layer:
        """Norms' scales and shifts folded into the matrices behind them, heads padded."""
        qkv, up = w.qkv.weight * w.norm1.weight, w.up.weight * w.norm2.weight
        qkv_bias = w.qkv.bias + w.qkv.weight @ w.norm1.bias
        up_bias = w.up.bias + w.up.weight @ w.norm2.bias
        proj = pad(w.proj.weight.view(-1, heads, head_dim)).flatten(1)
        columns = pad(qkv.T.reshape(-1, 3 * heads, head_dim)).flatten(1)
        return _Layer(
            *self._linear(columns, pad(qkv_bias.view(3 * heads, head_dim)).flatten()),
            *self._linear(proj.T, w.proj.bias),
            *self._linear(up.T, up_bias),
            *self._linear(w.down.weight.T, w.down.bias),
        )

    def _linear(self, weight: Tensor, bias: Tensor) -> tuple[int, int]:
        return self.keep(panels(weight)), self.keep(pad(bias))

    def new_cache(self, n: int, *, layers: int | None = None) -> NativeCache:
        """An empty cache for n rows."""
        depth, *rest = self.shape
        shape = depth if layers is None else layers, n, *rest
        k = torch.empty(shape, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
        return NativeCache(self, k, torch.empty_like(k), k.new_empty(0))

    def __call__(
        self,
        x: Tensor,
        lo: int,
        hi: int,
        condition: Tensor | None,
        temperature: float,
        cache: NativeCache | None,
    ) -> Tensor:
        """theta [n, hi - lo, P]; as `Block.params`."""
        n, need = len(x), max(lo - 1, 0)
        theta = x.new_empty(n, hi - lo, self.params)
        if lo == 0:
            theta[:, 0] = 0  # nothing stands before the first position: identity
        if hi == 1 or not n:
            return theta
        kept = cache is not None
        room = cache if cache is not None else self.new_cache(n, layers=1)
        first = min(room.valid, need)
        x = x if _packed(x) else x.contiguous()
        for count in (threads(), 1):
            scratch = room.reserve(self.lib.jf_scratch(self.address, n, hi - 1 - first, count))
            failed = self.lib.jf_params(
                *(self.address, n, first, need, hi - 1, x.data_ptr(), x.stride(0)),
                *_rows(condition),
                *(room.k.data_ptr(), room.v.data_ptr(), room.k.stride(0) if kept else 0),
                self._scale(temperature),
                *(theta.data_ptr() + (lo == 0) * 4 * self.params, theta.stride(0)),
                *(scratch, count),
            )
            if not failed:  # the system gave the threads
                break
        room.valid = hi - 1
        return theta

    def single(
        self,
        x: Tensor,
        z: Tensor,
        lo: int,
        hi: int,
        condition: Tensor | None,
        temperature: float,
        cache: NativeCache,
    ) -> Tensor | None:
        """Positions lo .. hi - 1 of x [n, T, D], one after the other, each written when those before it are
        there; their log |dx/dz| [n, hi - lo]. None where x or z are not what the function takes."""
        n = len(x)
        if not n or lo < 1 or cache.valid < lo - 1 or not all(map(_packed, (x, z))):
            return None
        slope = x.new_empty(n, hi - lo)
        for count in (threads(), 1):
            scratch = cache.reserve(self.lib.jf_solve_scratch(self.address, n, count))
            failed = self.lib.jf_solve(
                *(self.address, n, lo, hi, x.data_ptr(), x.stride(0), z.data_ptr(), z.stride(0)),
                *(slope.data_ptr(), slope.stride(0), *_rows(condition)),
                *(cache.k.data_ptr(), cache.v.data_ptr(), cache.k.stride(0), self._scale(temperature)),
                *(scratch, count),
            )
            if not failed:
                break
        cache.valid = hi - 1
        return slope

    def _scale(self, temperature: float) -> float:
        return 1.0 / (math.sqrt(self.head_dim) * temperature)


def _packed(t: Tensor) -> bool:
    """Single precision, and each row [T, D] in one piece; rows may be apart."""
    return t.dtype == torch.float32 and t.stride(2) == 1 and t.stride(1) == t.shape[2]


def _rows(condition: Tensor | None) -> tuple[int, int]:
    """The address of a condition [n or 1, 1, width] and how far its rows are apart."""
    if condition is None:
        return 0, 0
    return condition.data_ptr(), 0 if len(condition) == 1 else condition.stride(0)
