"""The C backend for causal transformers: packed weights, a padded cache, and the engine."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_long, c_void_p
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from jacobiflow.core.bijectors import Bijector, description
from jacobiflow.core.block import Affine, Cache, Conditioner, Engine, Start, TransformerLayer, TransformerNetwork
from jacobiflow.kernels.build import library
from jacobiflow.kernels.c_accept import accept
from jacobiflow.kernels.c_library import PANEL, TensorPins, in_rows, pad, panels, panels_of_pairs, structure
from jacobiflow.kernels.c_maps import CMap, c_map
from jacobiflow.kernels.threads import thread_count

CACHE_BYTES = 16 << 20  # keys and values of the rows that are solved at a time: they stay in the last cache
LARGE_BYTES = 32 << 20  # of memory that is new each time
FEWEST_ROWS = 16  # that are solved at a time, however large they are
MAPS = ("exp", "shift")  # the maps of jf_solve


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
        self.lib, self.network, self._keep, self._pairs = lib, network, TensorPins(), pairs
        (length, width), head_dim, depth = network.pos_embed.shape, network.head_dim, len(network.layers)
        heads = width // head_dim
        self._layers = (_Layer * depth)(*(self._layer(w, heads, head_dim) for w in network.layers))
        self.params = len(network.proj_out.weight)
        self.cache_shape = (depth, heads, -(-length // PANEL), head_dim + -head_dim % PANEL)
        self.row_bytes = 2 * depth * length * width * network.pos_embed.element_size()
        self._net = _Net(
            *(length, network.proj_in.weight.shape[1], width, heads, head_dim),
            *(len(network.layers[0].up.weight), depth, self.params),
            self._keep(panels(network.proj_in.weight.T)),
            self._keep(network.pos_embed + network.proj_in.bias),
            *(self._keep(panels(network.proj_out.weight.T)), self._keep(pad(network.proj_out.bias))),
            *(ctypes.cast(self._layers, c_void_p), pairs),
        )
        self.address = ctypes.addressof(self._net)

    @cached_property
    def rough(self) -> PackedTransformer:
        """The same network with layers in bfloat16."""
        return PackedTransformer(self.lib, self.network, pairs=True)

    def _layer(self, w: TransformerLayer, heads: int, head_dim: int) -> ctypes.Structure:
        """The norms' scales and shifts are folded into the matrices behind them; heads are padded."""
        qkv, qkv_bias = _folded(w.qkv, *w.norm1)
        up, up_bias = _folded(w.up, *w.norm2)
        proj = pad(w.proj.weight.view(-1, heads, head_dim)).flatten(1)
        columns = pad(qkv.T.reshape(-1, 3 * heads, head_dim)).flatten(1)
        return _Layer(
            *self._linear(columns, pad(qkv_bias.view(3 * heads, head_dim)).flatten()),
            *self._linear(proj.T, w.proj.bias),
            *self._linear(up.T, up_bias),
            *self._linear(w.down.weight.T, w.down.bias),
        )

    def _linear(self, weight: Tensor, bias: Tensor) -> tuple[int, int]:
        return self._keep((panels_of_pairs if self._pairs else panels)(weight)), self._keep(pad(bias))


@dataclass
class CCache:
    """Keys [layers, n, branches, heads, T / 16, head_dim, 16] and values [..., T / 16, 16, head_dim], padded.

    scratch: room to work in. filled: no input from there on was ever read.
    """

    k: Tensor
    v: Tensor
    scratch: Tensor
    filled: int = 0

    @classmethod
    def empty(cls, packed: PackedTransformer, n: int, branches: int, *, layers: int | None = None) -> CCache:
        depth, heads, count, size = packed.cache_shape
        return cls.shaped(((depth if layers is None else layers), n, branches, heads, count), size)

    @classmethod
    def shaped(cls, shape: Sequence[int], size: int) -> CCache:
        # Keys and values share one allocation, which malloc keeps for the next cache; it returned two to the system
        # each time. Larger ones are always returned, so they ask for large pages, which are quicker to map.
        k, v = both = torch.empty(2, *shape, size * PANEL, dtype=torch.float32, device="cpu")
        if both.nbytes > LARGE_BYTES and (lib := library()) is not None:
            lib.jf_large_pages(both.data_ptr(), both.nbytes)
        return cls(k.unflatten(-1, (size, PANEL)), v.unflatten(-1, (PANEL, size)), k.new_empty(0))

    def select(self, rows: Tensor) -> CCache:
        layers, _, *rest, size, _ = self.k.shape
        found, used = CCache.shaped((layers, len(rows), *rest), size), slice(-(-self.filled // PANEL))
        for mine, fresh in ((self.k, found.k), (self.v, found.v)) if self.filled else ():
            fresh[:, :, :, :, used] = mine[:, rows, :, :, used]
        return replace(found, scratch=self.scratch, filled=self.filled)

    def zero_nonfinite(self) -> None:
        """Nothing to do: the C functions read no entry that is not before the input at hand."""

    def reserve(self, size: int) -> int:
        """The address of room for so many numbers."""
        if len(self.scratch) < size:
            self.scratch = self.k.new_empty(size)
        return self.scratch.data_ptr()


@dataclass(frozen=True)
class CTransformerEngine(Engine):
    """A transformer and an affine map in C. For decoding: gradients go through the conditioner.

    condition, scale: of each branch and sample, [branches, n or 1, ...]. Guided samples have two branches,
    which run as rows of one batch. blend: the guidance weights [T, P].
    """

    packed: PackedTransformer
    map: CMap
    condition: Tensor | None  # [branches, n or 1, width]
    scale: Tensor  # [branches, n or 1], of attention logits
    blend: Tensor | None
    name = "c"

    @property
    def rows(self) -> int | None:  # type: ignore[override]
        return max(FEWEST_ROWS, CACHE_BYTES // (self.packed.row_bytes * len(self.scale)))

    accept = staticmethod(accept)

    def select(self, rows: Tensor) -> CTransformerEngine:
        condition = None if self.condition is None else _pick(self.condition, rows)
        return replace(self, condition=condition, scale=_pick(self.scale, rows))

    def rough(self) -> CTransformerEngine | None:
        found = c_long.in_dll(self.packed.lib, "jf_bfloat16").value
        return replace(self, packed=self.packed.rough) if found else None

    def new_cache(self, n: int) -> CCache:
        return CCache.empty(self.packed, n, len(self.scale))

    def params(self, x: Tensor, start: Start, width: int, cache: Cache | None) -> Tensor:
        assert cache is None or isinstance(cache, CCache)
        one, starts = (start, None) if isinstance(start, int) else (0, start.contiguous())
        n, x = len(x), in_rows(x)
        # Positions beyond the last are not written to.
        theta = (x.new_empty if starts is None else x.new_zeros)(n, width, self.packed.params)
        if not n:
            return theta
        room = CCache.empty(self.packed, n, len(self.scale), layers=1) if cache is None else cache
        rows = self._rows(x, room, kept=cache is not None)
        which = ctypes.addressof(rows), 0 if starts is None else starts.data_ptr(), one, width
        self._run("jf_params", room, which, (theta.data_ptr(),))
        last = one if starts is None else int(starts.max())
        room.filled = max(room.filled, min(last + width - 1, x.shape[1] - 1))
        return theta

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.map.inverse(z, theta)

    def solve(self, x: Tensor, z: Tensor, log_slope: Tensor, start: int, stop: int, cache: Cache | None) -> None:
        if cache is None:
            super().solve(x, z, log_slope, start, stop, cache)
        elif len(x) and start < stop:
            assert isinstance(cache, CCache)
            own, z, slopes = in_rows(x), in_rows(z), x.new_empty(len(x), stop - start)
            rows = self._rows(own, cache, kept=True)
            which = ctypes.addressof(rows), start, stop, z.data_ptr()
            self._run("jf_solve", cache, which, (z.stride(0), slopes.data_ptr(), slopes.stride(0), self.map.code))
            cache.filled = max(cache.filled, stop - 1)
            log_slope[:, start:stop] = slopes
            if own is not x:
                x.copy_(own)

    def _run(self, name: str, cache: CCache, which: tuple[int, ...], out: tuple[int, ...]) -> None:
        """Call a C function; on one thread if the system does not give more."""
        call, scratch = (getattr(self.packed.lib, word) for word in (name, f"{name}_scratch"))
        for count in (thread_count(), 1):
            room = cache.reserve(scratch(self.packed.address, *which, count))
            if not call(self.packed.address, *which, *out, room, count):
                break

    def _rows(self, x: Tensor, room: CCache, *, kept: bool) -> ctypes.Structure:
        assert room.k.shape[1:3] == (len(x), len(self.scale))
        condition, blend = (0, 0, 0), 0 if self.blend is None else self.blend.data_ptr()
        if self.condition is not None:
            condition = (self.condition.data_ptr(), *_strides(self.condition))
        return _Rows(
            *(len(x), len(self.scale), x.data_ptr(), x.stride(0), *condition),
            *(self.scale.data_ptr(), *_strides(self.scale), blend),
            *(room.k.data_ptr(), room.v.data_ptr(), room.k.stride(0) if kept else 0),
        )


def engine(conditioner: Conditioner, bijector: Bijector) -> CTransformerEngine | None:
    """The engine, if the C functions compute exactly this: in float32 on a CPU, without autocast."""
    network = description(conditioner)
    if type(network) is not TransformerNetwork or torch.is_autocast_enabled("cpu"):
        return None
    found = c_map(bijector)
    if found is None or found.formula.kind not in MAPS:
        return None
    fits = len(network.proj_out.weight) == network.proj_in.weight.shape[1] * bijector.params
    same = len({len(layer.up.weight) for layer in network.layers}) == 1
    lib = library() if fits and same and all(map(_readable, _tensors(network))) else None
    if lib is None:
        return None
    with torch.no_grad():
        packed = network.reuse(lambda: PackedTransformer(lib, network))
        condition, blend, branches = network.condition, network.blend, 1 if network.blend is None else 2
        temperature = network.pos_embed.new_ones(1) if network.temperature is None else network.temperature
        scale = _by_branch(network.head_dim**-0.5 / temperature, branches)
        condition = None if condition is None else _by_branch(condition.detach()[:, 0], branches)
        return CTransformerEngine(packed, found, condition, scale, None if blend is None else blend.contiguous())


def _tensors(network: TransformerNetwork) -> list[Tensor]:
    """Every one of them."""
    pairs = (network.proj_in, network.proj_out, *(pair for layer in network.layers for pair in layer))
    found = (network.pos_embed, network.condition, network.temperature, network.blend)
    return [t for pair in pairs for t in pair] + [t for t in found if t is not None]


def _readable(t: Tensor) -> bool:
    """Whether the numbers of t can be read where they lie: no subclass of Tensor, which may mean others."""
    plain = type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided
    return plain and t.device.type == "cpu" and t.dtype == torch.float32


def _folded(linear: Affine, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """linear(scale * x + shift) as one matrix and bias."""
    return linear.weight * scale, linear.bias + linear.weight @ shift


def _by_branch(t: Tensor, branches: int) -> Tensor:
    """[branches * n or 1, ...] as [branches, n or 1, ...]."""
    t = t.expand(branches, *t.shape[1:]) if len(t) == 1 else t
    return t.reshape(branches, len(t) // branches, *t.shape[1:]).contiguous()


def _pick(t: Tensor, rows: Tensor) -> Tensor:
    return t if t.shape[1] == 1 else t[:, rows]


def _strides(t: Tensor) -> tuple[int, int]:
    """How far branches and samples are apart; 0 if all samples share one."""
    return t.stride(0), 0 if t.shape[1] == 1 else t.stride(1)
