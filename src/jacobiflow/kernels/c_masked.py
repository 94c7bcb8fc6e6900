"""The C backend for masked networks."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_void_p
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.bijectors import Bijector, description
from jacobiflow.core.block import BoundNetwork, Cache, Conditioner, MaskedNetwork, Stage, Start
from jacobiflow.kernels.build import PANEL, library, structure
from jacobiflow.kernels.c_engine import WIDEST, CEngine, TensorPins, c_map, codes_of, in_rows, pad, panels, readable
from jacobiflow.kernels.threads import thread_count

DEEPEST = 32  # stages whose sums fit on any stack: those of jf_masked_solve
LAYERS = {nn.ReLU: "relu", nn.ELU: "elu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh"}  # by their names in C


def engine(conditioner: Conditioner, bijector: Bijector) -> CMaskedEngine | None:
    """The engine for a masked network and a bijector that the C code has, in float32 on a CPU; else None."""
    bound, by, lib = description(conditioner), c_map(bijector), library()
    if type(bound) is not BoundNetwork or by is None or by.kind == "shift" or lib is None:
        return None
    net = bound.network
    if type(net) is not MaskedNetwork or not net.stages or net.params != bijector.params:
        return None
    linears = ((stage.weight, stage.bias, *(stage.norm or ())) for stage in net.stages)
    tensors = (net.head, net.head_bias, *(t for ts in linears for t in ts), *bound.terms.values())
    odd = any(type(stage) is not Stage or stage.skip == 0 for stage in net.stages)
    if odd or activation_code(net.activation) is None or not readable(tensors):
        return None
    if net not in _PACKED:  # networks are made anew when their weights change
        _PACKED[net] = PackedNetwork(lib, net)
    n = next((t.shape[1] for t in bound.terms.values() if t.shape[1] != 1), 1)
    terms = {i: pad(t.expand(-1, n).T.contiguous()) for i, t in bound.terms.items()}
    return CMaskedEngine(by, _PACKED[net], terms)


def activation_code(activation: Callable[[Tensor], Tensor]) -> int | None:
    """The code of an activation that the C code has: a function of torch, or exactly one of these layers."""
    name, lib = LAYERS.get(type(activation), getattr(activation, "__name__", "")), library()
    known = type(activation) in LAYERS or activation in (getattr(F, name, None), getattr(torch, name, None))
    default = getattr(activation, "alpha", 1) == 1 and getattr(activation, "approximate", "none") == "none"
    return codes_of(lib)[1].get(name) if lib is not None and known and default else None


_Stage = structure("P weight bias factor offset limits ends L inputs outputs source activated skip")
_Masked = structure("L length params depth activation P stages")


class PackedNetwork:
    """The weights of a `MaskedNetwork` as the C functions take them: copies, in panels of 16 units."""

    def __init__(self, lib: ctypes.CDLL, net: MaskedNetwork) -> None:
        self.lib, self.keep = lib, TensorPins()
        self.sizes = [len(stage.weight) + -len(stage.weight) % PANEL for stage in net.stages]  # padded
        ends = tuple(range(net.params, len(net.head) + 1, net.params))  # of the parameters of each position
        head = Stage(net.head, net.head_bias, len(net.stages), net.head_activated, None, ends)
        self.stages = (_Stage * (len(net.stages) + 1))(*(self._stage(stage, net) for stage in (*net.stages, head)))
        sizes = net.length, net.params, len(net.stages), activation_code(net.activation)
        self.net = _Masked(*sizes, ctypes.cast(self.stages, c_void_p))
        self.address = ctypes.addressof(self.net)

    def _stage(self, stage: Stage, net: MaskedNetwork) -> ctypes.Structure:
        seen = range(net.length + 1) if stage.source == 0 else net.stages[stage.source - 1].ends
        units = range(len(stage.weight))
        reach = [seen[bisect_right(stage.ends, unit)] for unit in units]  # inputs that each sees, growing
        limits = [reach[min(p + PANEL, len(reach)) - 1] for p in range(0, len(reach), PANEL)]
        norm = (0, 0) if stage.norm is None else (self.keep(pad(t[:, 0])) for t in stage.norm)
        return _Stage(
            *(self.keep(panels(stage.weight.T)), self.keep(pad(stage.bias[:, 0])), *norm),
            *(self.keep(torch.tensor(whole, device="cpu")) for whole in (limits, stage.ends)),
            *(stage.weight.shape[1], len(stage.weight), stage.source, stage.activated),
            -1 if stage.skip is None else stage.skip,
        )


_PACKED: WeakKeyDictionary[MaskedNetwork, PackedNetwork] = WeakKeyDictionary()


class CUnits:
    """Hidden units [n, units] of the stages, before and after activation, up to the end of each row's last window.

    stored: only the units of inputs below it are kept: all, unless many rows were solved in one call (see bands.c).
    """

    def __init__(self, nodes: list[Tensor], active: list[Tensor], stored: int) -> None:
        self.nodes, self.active, self.stored = nodes, active, stored
        self.addresses = _addresses(nodes), _addresses(active)

    def select(self, rows: Tensor) -> CUnits:
        return CUnits([t[rows] for t in self.nodes], [t[rows] for t in self.active], self.stored)

    def zero_nonfinite(self) -> None:
        for t in (*self.nodes, *self.active):
            t.nan_to_num_(0, 0, 0)


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    """An array of pointers."""
    return (c_void_p * len(tensors))(*(0 if t is None else t.data_ptr() for t in tensors))


@dataclass(frozen=True)
class CMaskedEngine(CEngine):
    """A masked network in C, each row with its own window; sequential decoding is one call."""

    packed: PackedNetwork
    terms: Mapping[int, Tensor]  # of the context, by stage: [n or 1, units], padded; one row for all, or all have n

    @cached_property
    def context(self) -> tuple[Any, bool]:
        """The terms as C takes them, and whether they have one row for all."""
        shared = all(len(t) == 1 for t in self.terms.values())
        return _addresses([self.terms.get(i) for i in range(len(self.packed.sizes))]), shared

    def select(self, rows: Tensor) -> CMaskedEngine:
        return replace(self, terms={i: t if len(t) == 1 else t[rows] for i, t in self.terms.items()})

    def new_cache(self, n: int) -> CUnits:
        both = [torch.zeros(2, n, size, dtype=torch.float32, device="cpu").unbind() for size in self.packed.sizes]
        return CUnits([node for node, _ in both], [active for _, active in both], self.packed.net.length)

    def first(self, x: Tensor, cache: Cache | None) -> Tensor:
        return self.params(x.float(), 0, 1, cache)  # it reads no x

    def params(self, x: Tensor, start: Start, width: int, cache: Cache | None) -> Tensor:
        x, starts, net = in_rows(x), torch.as_tensor(start).contiguous(), self.packed.net
        if cache is None:
            cache = self.new_cache(len(x))
            cache.stored = 0
        assert isinstance(cache, CUnits)
        theta = (x.new_zeros if starts.ndim else x.new_empty)(len(x), width, net.params)  # padding stays zero
        if len(x):
            self.packed.lib.jf_masked(
                *(self.packed.address, len(x), cache.stored, starts.data_ptr(), starts.ndim, width),
                *(x.data_ptr(), x.stride(0), *cache.addresses, *self.context, theta.data_ptr(), thread_count()),
            )
            cache.stored = net.length
        return theta

    def solve(self, x: Tensor, z: Tensor, log_slope: Tensor, start: int, stop: int, cache: Cache | None) -> None:
        net = self.packed.net
        if cache is None or net.depth > DEEPEST or net.params > WIDEST or z.dtype != torch.float32:
            super().solve(x, z, log_slope, start, stop, cache)
        elif len(x) and start < stop:
            assert isinstance(cache, CUnits)
            own, z, slopes = in_rows(x), in_rows(z), in_rows(log_slope)
            kept = self.packed.lib.jf_masked_solve(
                *(self.packed.address, len(x), cache.stored, start, stop, own.data_ptr(), own.stride(0)),
                *(z.data_ptr(), z.stride(0), slopes.data_ptr(), slopes.stride(0)),
                *(*cache.addresses, *self.context, self.map.code, self.map.numbers, thread_count()),
            )
            cache.stored = net.length if kept else min(cache.stored, max(start - 1, 0))
            for ours, given in ((own, x), (slopes, log_slope)):
                given.copy_(ours)  # nothing happens if they are the same
