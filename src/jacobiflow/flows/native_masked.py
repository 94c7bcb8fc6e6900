"""The compiled masked network: a `Packed` network's weights as it takes them."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float, c_long, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.bijectors import Compiled
from jacobiflow.core.native import PANEL, Kept, pad, panels, threads
from jacobiflow.flows.units import Units

NUMBERS = 5  # that a map has at most, as in masked.h
DEEPEST, WIDEST = 32, 256  # layers and parameters whose sums the stack of a thread has room for, anywhere
RELU, ELU, GELU, SILU, TANH = range(1, 6)  # as in masked.c
FUNCTIONS: dict[Any, int] = {
    F.relu: RELU,
    torch.relu: RELU,
    F.elu: ELU,
    F.gelu: GELU,
    F.silu: SILU,
    torch.tanh: TANH,
    F.tanh: TANH,
}
MODULES: dict[Any, int] = {nn.ReLU: RELU, nn.ELU: ELU, nn.GELU: GELU, nn.SiLU: SILU, nn.Tanh: TANH}


def kind(activation: Callable[[Tensor], Tensor]) -> int | None:
    """The number of an activation that the compiled function knows."""
    if getattr(activation, "alpha", 1) != 1 or getattr(activation, "approximate", "none") != "none":
        return None
    return MODULES.get(type(activation)) or FUNCTIONS.get(activation)


class _Stage(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("weight", "bias", "factor", "offset", "limits", "ends")),
        *((name, c_long) for name in ("inputs", "outputs", "source", "activated", "skip")),
    ]


class _Masked(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("length", "params", "depth", "activation")),
        ("stages", c_void_p),
    ]


class NativeMasked:
    """A masked network for the compiled function."""

    def __init__(self, lib: ctypes.CDLL, packed: Any, activation: int) -> None:
        self.lib = lib
        self.keep = Kept()
        self.sizes = [len(stage.weight) for stage in packed.stages]
        self.ends = [stage.ends for stage in packed.stages]
        stages = [self._stage(stage, packed) for stage in packed.stages]
        stages.append(self._head(packed))
        self.stages = (_Stage * len(stages))(*stages)
        self.net = _Masked(
            *(packed.length, packed.params, len(packed.stages), activation),
            ctypes.cast(self.stages, c_void_p),
        )
        self.address = ctypes.addressof(self.net)

    def _stage(self, stage: Any, packed: Any) -> _Stage:
        factor, offset = (None, None) if stage.norm is None else stage.norm
        degrees = [bisect_right(stage.ends, unit) for unit in range(len(stage.weight))]
        return self._linear(
            stage.weight,
            stage.bias,
            _reach(packed, stage.source, degrees),
            stage.ends,
            *(0 if t is None else self.keep(pad(t[:, 0])) for t in (factor, offset)),
            *(stage.source, stage.activated, -1 if stage.skip is None else stage.skip),
        )

    def _head(self, packed: Any) -> _Stage:
        degrees = [t for t in range(packed.length) for _ in range(packed.params)]
        last = len(packed.stages)
        reach = _reach(packed, last, degrees)
        return self._linear(packed.head, packed.head_bias, reach, (), 0, 0, last, packed.head_activated, -1)

    def _linear(
        self, weight: Tensor, bias: Tensor, reach: Sequence[int], ends: Sequence[int], *rest: int
    ) -> _Stage:
        """reach: inputs that each unit sees, growing."""
        factor, offset, source, activated, skip = rest
        limits = [reach[min(p + PANEL, len(reach)) - 1] for p in range(0, len(reach), PANEL)]
        return _Stage(
            *(self.keep(panels(weight.T)), self.keep(pad(bias[:, 0])), factor, offset),
            self.keep(torch.tensor(limits, device="cpu")),
            self.keep(torch.tensor(ends, device="cpu")) if ends else 0,
            *(weight.shape[1], len(weight), source, activated, skip),
        )

    def new_cache(self, n: int, context: Mapping[int, Tensor]) -> NativeUnits:
        """As `Packed.new_cache`."""
        terms = {i: pad(term.T.contiguous()) for i, term in context.items()}
        like = torch.empty(0, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
        nodes = [like.new_empty(n, size + -size % PANEL) for size in self.sizes]
        return NativeUnits(self, nodes, [torch.empty_like(node) for node in nodes], terms)


class NativeUnits(Units):
    """Hidden units [n, units] before and after activation, and context terms of some layers."""

    def __init__(
        self, net: NativeMasked, nodes: list[Tensor], active: list[Tensor], context: dict[int, Tensor]
    ) -> None:
        self.net, self.nodes, self.active, self.context = net, nodes, active, context
        self.valid = 0
        self.shared = any(len(term) == 1 for term in context.values())
        terms = [context.get(i) for i in range(len(nodes))]
        self.addresses = _addresses(nodes), _addresses(active), _addresses(terms)

    def select(self, rows: Tensor) -> NativeUnits:
        def pick(t: Tensor, end: int) -> Tensor:
            fresh = t.new_empty(len(rows), t.shape[1])
            fresh[:, :end] = t[rows, :end]
            return fresh

        ends = [ends[self.valid] for ends in self.net.ends]
        nodes, active = (
            [pick(t, end) for t, end in zip(all_, ends, strict=True)] for all_ in (self.nodes, self.active)
        )
        context = {i: term if self.shared else term[rows] for i, term in self.context.items()}
        fewer = NativeUnits(self.net, nodes, active, context)
        fewer.valid = self.valid
        return fewer

    def params(self, x: Tensor, lo: int, hi: int) -> Tensor:
        if x.dtype != torch.float32:  # its bytes would be read as other numbers
            raise ValueError(f"x is {x.dtype}, the network {torch.float32}: cast one of them")
        net = self.net.net
        theta = x.new_empty(len(x), hi - lo, net.params)
        if x.stride(1) != 1:
            x = x.contiguous()
        if len(x):
            nodes, active, context = self.addresses
            self.net.lib.jf_masked(
                *(self.net.address, len(x), min(self.valid, hi - 1), hi - 1, lo, hi),
                *(x.data_ptr(), x.stride(0), nodes, active, context, self.shared),
                *(theta.data_ptr(), threads()),
            )
        self.valid = max(self.valid, hi - 1)
        return theta

    def single(self, x: Tensor, z: Tensor, lo: int, hi: int, by: Compiled) -> Tensor | None:
        """Positions lo .. hi - 1 of x [n, T, 1], one after the other, each written when those before it are
        there; their log |dx/dz| [n, hi - lo]. None where x or z are not what the function takes."""
        plain = all(t.dtype == torch.float32 and t.stride(1) == 1 and t.shape[2] == 1 for t in (x, z))
        net = self.net.net
        if not plain or not len(x) or net.depth > DEEPEST or net.params > WIDEST:
            return None
        number, numbers = by
        slope = x.new_empty(len(x), hi - lo)
        nodes, active, context = self.addresses
        stored = self.net.lib.jf_masked_solve(
            *(self.net.address, len(x), min(self.valid, lo), lo, hi),
            *(x.data_ptr(), x.stride(0), z.data_ptr(), z.stride(0)),
            *(slope.data_ptr() - lo * slope.element_size(), slope.stride(0)),
            *(nodes, active, context, self.shared, number, (c_float * NUMBERS)(*numbers), threads()),
        )
        if stored:
            self.valid = max(self.valid, hi - 1)
        return slope


def _reach(packed: Any, source: int, degrees: Sequence[int]) -> list[int]:
    """How many units of node `source` a unit of each degree sees."""
    if source == 0:
        return list(degrees)
    ends = packed.stages[source - 1].ends
    return [ends[d] for d in degrees]


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    """An array of pointers."""
    return (c_void_p * max(len(tensors), 1))(*(0 if t is None else t.data_ptr() for t in tensors))
