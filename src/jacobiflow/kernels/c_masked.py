"""The C backend for masked networks."""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_long, c_void_p
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.block import Cache, Conditioner, Start
from jacobiflow.core.description import description
from jacobiflow.core.networks import BoundNetwork, MaskedNetwork, Stage
from jacobiflow.kernels.build import library
from jacobiflow.kernels.c_accept import accept
from jacobiflow.kernels.c_library import PANEL, TensorPins, codes_of, pad, panels
from jacobiflow.kernels.c_maps import CMap, c_map
from jacobiflow.kernels.threads import thread_count
from jacobiflow.kernels.torch_reference import solve_by_steps

DEEPEST, WIDEST = 32, 256  # stages and parameters whose sums fit on any stack: those of jf_masked_solve
FUNCTIONS: tuple[tuple[Callable[..., Tensor], str], ...] = (
    (F.relu, "relu"),
    (torch.relu, "relu"),
    (F.elu, "elu"),
    (F.gelu, "gelu"),
    (F.silu, "silu"),
    (torch.tanh, "tanh"),
    (F.tanh, "tanh"),
)
MODULES = {nn.ReLU: "relu", nn.ELU: "elu", nn.GELU: "gelu", nn.SiLU: "silu", nn.Tanh: "tanh"}


def engine(conditioner: Conditioner, bijector: Bijector) -> CMaskedEngine | None:
    """The engine for a masked network and a bijector that the C code has, in float32 on a CPU; else None.

    Weights may require gradients: engines run in the decoding loop, which records none.
    """
    bound, by = description(conditioner), c_map(bijector)
    if type(bound) is not BoundNetwork or by is None or by.formula.kind == "shift":
        return None
    if not _supported(bound, bijector.params):
        return None
    return CMaskedEngine(_packed(bound.network), by, bound.terms)


def activation_code(activation: Callable[[Tensor], Tensor]) -> int | None:
    """The code of an activation that the C code has: one of these functions or exactly these layers."""
    if getattr(activation, "alpha", 1) != 1 or getattr(activation, "approximate", "none") != "none":
        return None
    name = next((name for f, name in FUNCTIONS if f is activation), MODULES.get(type(activation)))
    lib = library()
    return None if name is None or lib is None else codes_of(lib)[1].get(name)


def _supported(bound: BoundNetwork, params: int) -> bool:
    net = bound.network
    if type(net) is not MaskedNetwork or not net.stages or net.params != params:
        return False
    if library() is None or torch.is_autocast_enabled("cpu") or activation_code(net.activation) is None:
        return False
    if any(type(stage) is not Stage or stage.skip == 0 for stage in net.stages):
        return False
    linears = ((stage.weight, stage.bias, *(stage.norm or ())) for stage in net.stages)
    tensors = (net.head, net.head_bias, *(t for ts in linears for t in ts), *bound.terms.values())
    return all(t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)


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


class PackedNetwork:
    """The weights of a `MaskedNetwork` as the C functions take them: copies, in panels of 16 units."""

    def __init__(self, net: MaskedNetwork) -> None:
        lib = library()
        assert lib is not None
        self.lib, self.keep = lib, TensorPins()
        self.sizes = [len(stage.weight) for stage in net.stages]
        stages = [*(self._stage(stage, net) for stage in net.stages), self._head(net)]
        self.stages = (_Stage * len(stages))(*stages)
        code = activation_code(net.activation)
        places = ctypes.cast(self.stages, c_void_p)
        self.net = _Masked(net.length, net.params, len(net.stages), code, places)
        self.address = ctypes.addressof(self.net)

    def _stage(self, stage: Stage, net: MaskedNetwork) -> _Stage:
        degrees = [bisect_right(stage.ends, unit) for unit in range(len(stage.weight))]
        factor, offset = (0, 0) if stage.norm is None else (self.keep(pad(t[:, 0])) for t in stage.norm)
        skip = -1 if stage.skip is None else stage.skip
        reach = _reach(net, stage.source, degrees)
        rest = factor, offset, stage.source, stage.activated, skip
        return self._linear(stage.weight, stage.bias, reach, stage.ends, *rest)

    def _head(self, net: MaskedNetwork) -> _Stage:
        degrees = [t for t in range(net.length) for _ in range(net.params)]
        last = len(net.stages)
        reach = _reach(net, last, degrees)
        return self._linear(net.head, net.head_bias, reach, (), 0, 0, last, net.head_activated, -1)

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


def _reach(net: MaskedNetwork, source: int, degrees: Sequence[int]) -> list[int]:
    """How many units of node `source` a unit of each degree sees."""
    if source == 0:
        return list(degrees)
    ends = net.stages[source - 1].ends
    return [ends[d] for d in degrees]


_PACKED: WeakKeyDictionary[MaskedNetwork, PackedNetwork] = WeakKeyDictionary()


def _packed(net: MaskedNetwork) -> PackedNetwork:
    """Made once per network; networks are made anew when their weights change."""
    if net not in _PACKED:
        _PACKED[net] = PackedNetwork(net)
    return _PACKED[net]


class CUnits:
    """Hidden units [n, units] before and after activation, and context terms [n or 1, units] of some stages.

    Each row holds the units that see its own inputs up to the end of its last window, and zeros beyond.
    stored: only the units of inputs below it are kept. It is the length, unless many rows were solved in one
    call, which keeps no units (see bands.c). The next call then computes them from x.
    """

    def __init__(
        self, nodes: list[Tensor], active: list[Tensor], terms: Mapping[int, Tensor], stored: int
    ) -> None:
        self.nodes, self.active, self.terms, self.stored = nodes, active, terms, stored
        self.shared = all(len(term) == 1 for term in terms.values())
        found = [terms.get(i) for i in range(len(nodes))]
        self.addresses = _addresses(nodes), _addresses(active), _addresses(found), self.shared

    def select(self, rows: Tensor) -> CUnits:
        terms = self.terms if self.shared else {i: term[rows] for i, term in self.terms.items()}
        return CUnits([t[rows] for t in self.nodes], [t[rows] for t in self.active], terms, self.stored)

    def zero_nonfinite(self) -> None:
        for t in (*self.nodes, *self.active):
            t.nan_to_num_(0, 0, 0)


def _addresses(tensors: Sequence[Tensor | None]) -> Any:
    """An array of pointers."""
    return (c_void_p * len(tensors))(*(0 if t is None else t.data_ptr() for t in tensors))


@dataclass(frozen=True)
class CMaskedEngine:
    """A masked network in C, each row with its own window; sequential decoding is one call."""

    network: PackedNetwork
    map: CMap
    terms: Mapping[int, Tensor]  # [units, n or 1]
    name: str = "c"
    compacts: bool = True
    rows: int | None = None

    accept = staticmethod(accept)

    def select(self, rows: Tensor) -> CMaskedEngine:
        return replace(self, terms={i: t if t.shape[1] == 1 else t[:, rows] for i, t in self.terms.items()})

    def rough(self) -> None:
        """Masked networks have no bfloat16."""

    def new_cache(self, n: int) -> CUnits:
        like = torch.empty(0, dtype=torch.float32, device="cpu")  # whatever torch's defaults are
        nodes = [like.new_zeros(n, size + -size % PANEL) for size in self.network.sizes]
        shared = all(t.shape[1] == 1 for t in self.terms.values())
        terms = {i: pad((t if shared else t.expand(-1, n)).T.contiguous()) for i, t in self.terms.items()}
        return CUnits(nodes, [torch.zeros_like(node) for node in nodes], terms, self.network.net.length)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache | None) -> Tensor:
        _check_dtype(x)
        if cache is None:
            cache = self.new_cache(len(x))
            cache.stored = 0
        assert isinstance(cache, CUnits)
        net, shape = self.network, (len(x), width, self.network.net.params)
        if isinstance(start, int):
            low, starts, theta = start, None, x.new_empty(shape)
        else:
            low, starts, theta = 0, start.contiguous(), x.new_zeros(shape)  # where padding stays zero
        if len(x):
            x = _plain(x)
            net.lib.jf_masked(
                *(net.address, len(x), cache.stored, low, 0 if starts is None else starts.data_ptr(), width),
                *(x.data_ptr(), x.stride(0), *cache.addresses, theta.data_ptr(), thread_count()),
            )
            cache.stored = net.net.length
        return theta

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.map.inverse(z, theta)

    def solve(
        self, x: Tensor, z: Tensor, log_slope: Tensor, start: int, stop: int, cache: Cache | None
    ) -> None:
        _check_dtype(x, z, log_slope)
        net = self.network
        if cache is None or net.net.depth > DEEPEST or net.net.params > WIDEST:
            solve_by_steps(self, x, z, log_slope, start, stop, cache)
        elif len(x) and start < stop:
            assert isinstance(cache, CUnits)
            found, latent, slopes = _plain(x), _plain(z), _plain(log_slope)
            kept = net.lib.jf_masked_solve(
                *(net.address, len(x), cache.stored, start, stop, found.data_ptr(), found.stride(0)),
                *(latent.data_ptr(), latent.stride(0), slopes.data_ptr(), slopes.stride(0)),
                *(*cache.addresses, self.map.code, self.map.numbers, thread_count()),
            )
            cache.stored = net.net.length if kept else min(cache.stored, start - 1)
            for ours, given in ((found, x), (slopes, log_slope)):
                if ours is not given:
                    given.copy_(ours)


def _check_dtype(*tensors: Tensor) -> None:
    """The bytes of other types would be read as other numbers."""
    for t in tensors:
        if t.dtype != torch.float32:
            raise ValueError(f"z is {t.dtype}, the network {torch.float32}: cast one of them")


def _plain(t: Tensor) -> Tensor:
    """[n, T] or [n, T, 1], each row in one piece; rows may be apart."""
    return t if t.stride(1) == 1 else t.contiguous()
