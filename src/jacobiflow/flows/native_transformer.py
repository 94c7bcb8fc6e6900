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
        k = torch.empty(depth if layers is None else layers, n, *rest)
        return NativeCache(self, k, torch.empty_like(k), torch.empty(0))

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
        first, count = min(room.valid, need), threads()
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            x = x.contiguous()
        while True:
            size = self.lib.jf_scratch(self.address, n, hi - 1 - first, count)
            if len(room.scratch) < size:
                room.scratch = torch.empty(size)
            failed = self.lib.jf_params(
                *(self.address, n, first, need, hi - 1, x.data_ptr(), x.stride(0)),
                0 if condition is None else condition.data_ptr(),
                0 if condition is None or len(condition) == 1 else condition.stride(0),
                *(room.k.data_ptr(), room.v.data_ptr(), room.k.stride(0) if kept else 0),
                1.0 / (math.sqrt(self.head_dim) * temperature),
                *(theta.data_ptr() + (lo == 0) * 4 * self.params, theta.stride(0)),
                *(room.scratch.data_ptr(), count),
            )
            if not failed:
                break
            count = 1  # the system gave no more
        room.valid = hi - 1
        return theta
