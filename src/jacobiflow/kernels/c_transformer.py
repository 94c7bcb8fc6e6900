"""The C backend for causal transformers: packed weights, a padded cache, and the engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_long, c_void_p
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from jacobiflow.core.bijectors import Bijector, description
from jacobiflow.core.block import Cache, Conditioner, Start, TransformerLayer, TransformerNetwork
from jacobiflow.kernels.build import PANEL, library, structure
from jacobiflow.kernels.c_engine import CEngine, TensorPins, c_map, in_rows, pad, panels, panels_of_pairs, readable
from jacobiflow.kernels.threads import thread_count

CACHE_BYTES = 16 << 20  # keys and values of the rows that are solved at a time: they stay in the last cache
LARGE_BYTES = 32 << 20  # of memory that is new each time
FEWEST_ROWS = 16  # that are solved at a time, however large they are

_Layer = structure("P qkv qkv_bias proj proj_bias up up_bias down down_bias")
_Net = structure(
    "L length dim width heads head_dim hidden depth params P input embed output output_bias layers L pairs"
)
_Rows = structure(
    "L samples branches P x L x_row P condition L condition_branch condition_row "
    "P scale L scale_branch scale_row P blend k v L layer"
)


class PackedTransformer:
    """The weights of a network as the C functions take them; pairs: those of the layers in bfloat16."""

    def __init__(self, lib: ctypes.CDLL, network: TransformerNetwork, *, pairs: bool = False) -> None:
        self.lib, self.network, self._keep = lib, network, TensorPins()
        self._panels = panels_of_pairs if pairs else panels
        (length, width), head_dim, depth = network.pos_embed.shape, network.head_dim, len(network.layers)
        heads, (head, head_bias) = width // head_dim, network.proj_out
        self._layers = (_Layer * depth)(*(self._layer(w, heads, head_dim) for w in network.layers))
        self.params = len(head)
        self.cache_shape = (depth, heads, -(-length // PANEL), head_dim + -head_dim % PANEL)
        self.row_bytes = 2 * depth * length * width * network.pos_embed.element_size()
        self._net = _Net(
            *(length, network.proj_in.weight.shape[1], width, heads, head_dim),
            *(len(network.layers[0].up.weight), depth, self.params),
            *(self._keep(panels(network.proj_in.weight.T)), self._keep(network.pos_embed + network.proj_in.bias)),
            *(self._keep(panels(head.T)), self._keep(pad(head_bias)), ctypes.cast(self._layers, c_void_p), pairs),
        )
        self.address = ctypes.addressof(self._net)

    @cached_property
    def rough(self) -> PackedTransformer:
        """The same network with layers in bfloat16."""
        return PackedTransformer(self.lib, self.network, pairs=True)

    def _layer(self, w: TransformerLayer, heads: int, head_dim: int) -> ctypes.Structure:
        """The norms' scales and shifts are folded into the matrices behind them; heads are padded."""
        (scale1, shift1), (scale2, shift2) = w.norm1, w.norm2
        qkv, qkv_bias = (w.qkv.weight * scale1).T, w.qkv.bias + w.qkv.weight @ shift1
        qkv, qkv_bias = (pad(t.reshape(-1, 3 * heads, head_dim)).flatten(1) for t in (qkv, qkv_bias))
        linears = (
            (qkv, qkv_bias[0]),
            (pad(w.proj.weight.view(-1, heads, head_dim)).flatten(1).T, w.proj.bias),
            ((w.up.weight * scale2).T, w.up.bias + w.up.weight @ shift2),
            (w.down.weight.T, w.down.bias),
        )
        return _Layer(*(self._keep(t) for weight, bias in linears for t in (self._panels(weight), pad(bias))))


@dataclass
class CCache:
    """Keys [layers, n, branches, heads, T / 16, head_dim, 16] and values [..., T / 16, 16, head_dim], padded."""

    k: Tensor
    v: Tensor
    scratch: Tensor  # room to work in

    @classmethod
    def empty(cls, shape: Sequence[int]) -> CCache:
        """An empty cache of this shape: that of the keys but for the last 16."""
        # One allocation: malloc keeps it for the next cache, but for large ones: those ask for pages quick to map.
        k, v = both = torch.empty(2, *shape, PANEL, dtype=torch.float32, device="cpu")
        if both.nbytes > LARGE_BYTES and (lib := library()) is not None:
            lib.jf_large_pages(both.data_ptr(), both.nbytes)
        return cls(k, v.view(*shape[:-1], PANEL, shape[-1]), k.new_empty(0))

    def select(self, rows: Tensor) -> CCache:
        layers, _, *rest = self.k.shape[:-1]
        found = CCache.empty((layers, len(rows), *rest))
        torch.index_select(self.k, 1, rows, out=found.k)
        torch.index_select(self.v, 1, rows, out=found.v)
        return replace(found, scratch=self.scratch)

    def zero_nonfinite(self) -> None:
        """Nothing to do: the C functions read no entry that is not before the input at hand."""


@dataclass(frozen=True)
class CTransformerEngine(CEngine):
    """A transformer and an affine map in C. The two branches of guided samples run as rows of one batch."""

    packed: PackedTransformer
    condition: Tensor  # [branches, n or 1, width]
    scale: Tensor  # of attention logits, [branches, n or 1]
    blend: Tensor | None  # the guidance weights [T, P]

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        return max(FEWEST_ROWS, CACHE_BYTES // (self.packed.row_bytes * len(self.scale)))

    def select(self, rows: Tensor) -> CTransformerEngine:
        condition, scale = (t if t.shape[1] == 1 else t[:, rows] for t in (self.condition, self.scale))
        return replace(self, condition=condition, scale=scale)

    def rough(self) -> CTransformerEngine | None:
        found = c_long.in_dll(self.packed.lib, "jf_bfloat16").value
        return replace(self, packed=self.packed.rough) if found else None

    def new_cache(self, n: int, layers: int | None = None) -> CCache:
        depth, *rest = self.packed.cache_shape
        return CCache.empty((layers or depth, n, len(self.scale), *rest))

    def first(self, x: Tensor, cache: Cache | None) -> Tensor:
        return x.new_zeros(len(x), 1, self.packed.params, dtype=torch.float32)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache | None) -> Tensor:
        assert cache is None or isinstance(cache, CCache)
        x, starts = in_rows(x), torch.as_tensor(start).contiguous()
        theta = (x.new_zeros if starts.ndim else x.new_empty)(len(x), width, self.packed.params)  # padding stays zero
        if len(x):
            room = self.new_cache(len(x), layers=1) if cache is None else cache
            where = starts.data_ptr(), starts.ndim, width
            self._run("jf_params", x, room, where, theta.data_ptr(), kept=cache is not None)
        return theta

    def solve(self, x: Tensor, z: Tensor, log_slope: Tensor, start: int, stop: int, cache: Cache | None) -> None:
        if cache is None or start == 0:
            super().solve(x, z, log_slope, start, stop if cache is None else min(stop, 1), cache)
            start = max(start, 1)
        if cache is not None and len(x) and start < stop:
            assert isinstance(cache, CCache)
            own, z, slopes = in_rows(x), in_rows(z), x.new_empty(len(x), stop - start)
            out = z.stride(0), slopes.data_ptr(), slopes.stride(0), self.map.code
            self._run("jf_solve", own, cache, (start, stop, z.data_ptr()), *out)
            log_slope[:, start:stop] = slopes
            x.copy_(own)  # nothing happens if they are the same

    def _run(self, name: str, x: Tensor, room: CCache, where: tuple[int, ...], *out: int, kept: bool = True) -> None:
        """Call a C function; on one thread if the system does not give more."""
        n, branches = len(x), len(self.scale)
        assert room.k.shape[1:3] == (n, branches)
        rows = _Rows(
            *(n, branches, x.data_ptr(), x.stride(0)),
            *(self.condition.data_ptr(), *self.condition.expand(-1, n, -1).stride()[:2]),  # 0 if samples share one
            *(self.scale.data_ptr(), *self.scale.expand(-1, n).stride()),
            0 if self.blend is None else self.blend.data_ptr(),
            *(room.k.data_ptr(), room.v.data_ptr(), room.k.stride(0) if kept else 0),
        )
        call, scratch = (getattr(self.packed.lib, word) for word in (name, f"{name}_scratch"))
        given = self.packed.address, ctypes.addressof(rows), *where
        for count in (thread_count(), 1):
            size = scratch(*given, count)
            if len(room.scratch) < size:
                room.scratch = room.k.new_empty(size)
            if not call(*given, *out, room.scratch.data_ptr(), count):
                break


def engine(conditioner: Conditioner, bijector: Bijector) -> CTransformerEngine | None:
    """The engine, if the C functions compute exactly this: in float32 on a CPU, without autocast."""
    network, by, lib = description(conditioner), c_map(bijector), library()
    if type(network) is not TransformerNetwork or by is None or by.kind not in ("exp", "shift") or lib is None:
        return None
    pairs = (network.proj_in, network.proj_out, *(pair for layer in network.layers for pair in layer))
    bound = (network.pos_embed, network.condition, network.temperature, network.blend)
    tensors = [t for pair in pairs for t in pair] + [t for t in bound if t is not None]
    fits = len(network.proj_out.weight) == network.proj_in.weight.shape[1] * bijector.params
    if not fits or len({len(layer.up.weight) for layer in network.layers}) != 1 or not readable(tensors):
        return None
    with torch.no_grad():
        packed = network.reuse(lambda: PackedTransformer(lib, network))
        like, blend, branches = network.pos_embed, network.blend, 1 if network.blend is None else 2
        condition = like.new_zeros(1, 1, like.shape[1]) if network.condition is None else network.condition.detach()
        scale = network.head_dim**-0.5 / (like.new_ones(1) if network.temperature is None else network.temperature)
        condition, scale = (
            torch.stack((torch.cat([t] * branches) if len(t) == 1 else t).chunk(branches))
            for t in (condition[:, 0], scale)
        )
        return CTransformerEngine(by, packed, condition, scale, None if blend is None else blend.contiguous())
