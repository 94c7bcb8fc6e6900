"""What the C engines share: packed weights, elementwise maps, and what a sweep makes final."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from ctypes import addressof, c_float
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow.core.bijectors import Bijector, Formula, description
from jacobiflow.core.block import Engine
from jacobiflow.core.method import Method
from jacobiflow.core.rows import Look, Rows, Verdict, Window
from jacobiflow.core.rows import accept as in_torch
from jacobiflow.core.stopping import ROUNDING, backends_know
from jacobiflow.kernels.build import PANEL, library, structure

AFFINE = ("exp", "softplus", "sigmoid")  # the maps of jf_affine
WIDEST = 256  # parameters of a position that fit on any stack: those of jf_map and jf_masked_solve

_Sweep = structure(
    "L n length dim z_row guess_row seen_row answer_row log_slope_row "
    "P z guess seen answer log_slope frontier sweeps evaluated status change "
    "F tol rounding I relative whole P here beyond largest Q summary"
)


@cache
def codes_of(lib: ctypes.CDLL) -> tuple[dict[str, int], dict[str, int]]:
    """The codes of elementwise maps, by "name:count of numbers", and of activations, by name."""
    maps, activations = (text().decode().split() for text in (lib.jf_codes, lib.jf_activations))
    return {name: code for code, name in enumerate(maps)}, {name: code for code, name in enumerate(activations)}


def pad(t: Tensor) -> Tensor:
    """The last dimension with zeros up to a whole number of panels."""
    return nn.functional.pad(t, (0, -t.shape[-1] % PANEL))


def panels(weight: Tensor) -> Tensor:
    """[in, out] as [panels, in, 16], padded with zeros."""
    return pad(weight).reshape(len(weight), -1, PANEL).transpose(0, 1)


def panels_of_pairs(weight: Tensor) -> Tensor:
    """[in, out] as [panels, in / 2, 16], two neighbours along `in` in bfloat16 per number."""
    rows = pad(weight.T).T.to(torch.bfloat16)
    pairs = pad(rows).reshape(len(rows) // 2, 2, -1, PANEL).permute(2, 0, 3, 1)
    return pairs.contiguous().view(torch.float32)[..., 0]


class TensorPins(list[Tensor]):
    """Tensors whose addresses C holds: they live as long as this object."""

    def __call__(self, t: Tensor) -> int:
        """The address of t, made contiguous."""
        self.append(t.detach().contiguous())
        return self[-1].data_ptr()


def readable(tensors: Iterable[Tensor]) -> bool:
    """Whether C may read the numbers: float32 on a CPU, outside of autocast; a subclass may mean other numbers."""
    return not torch.is_autocast_enabled("cpu") and all(
        type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and t.is_cpu and t.dtype == torch.float32
        for t in tensors
    )


def in_rows(t: Tensor) -> Tensor:
    """[n, T] or [n, T, D] in float32 with each row in one piece; rows may be apart."""
    if t.dtype != torch.float32:  # its bytes would be read as other numbers
        raise ValueError(f"x is {t.dtype}, the network {torch.float32}: cast one of them")
    return t if t.stride(-1) == 1 and t.stride(1) == math.prod(t.shape[2:]) else t.contiguous()


@dataclass(frozen=True)
class CMap:
    """A bijector and how the C kernels know it."""

    bijector: Bijector
    kind: str
    code: int
    numbers: Any  # of its formula, as C takes them

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """x and log |dx/dz| [n, w, d] of theta [n, w, P d]: by C if the map is affine or w d is 1, else by torch."""
        lib, (n, w, d), params = library(), z.shape, theta.shape[-1]
        known = params == 2 * d if self.kind in AFFINE else w * d == 1 and params <= WIDEST and self.kind != "shift"
        if lib is None or not known or theta.shape[:2] != (n, w) or not z.dtype == theta.dtype == torch.float32:
            return self.bijector.inverse(z, theta)
        z, theta = in_rows(z), theta.contiguous()
        x, log_slope = z.new_empty(n, w, d), z.new_empty(n, w, d)
        places = theta.data_ptr(), x.data_ptr(), log_slope.data_ptr()
        if self.kind in AFFINE:
            lib.jf_affine(self.code, self.numbers[0], n, w, d, z.data_ptr(), z.stride(0), *places)
        else:
            lib.jf_map(self.code, self.numbers, n, params, z.data_ptr(), z.stride(0), *places)
        return x, log_slope


def c_map(bijector: Bijector) -> CMap | None:
    """The map of the C kernels with this bijector's formula, if there is one."""
    formula, lib = description(bijector), library()
    if type(formula) is not Formula or lib is None:
        return None
    kind, numbers = formula
    code = codes_of(lib)[0].get(f"{kind}:{len(numbers)}")
    if code is None or (kind in AFFINE and numbers and numbers[0] < torch.finfo(torch.float32).tiny):
        return None  # scales without a floor may be subnormal, which C takes no log of
    return CMap(bijector, kind, code, (c_float * max(len(numbers), 2))(*numbers))


def accept(rows: Rows, window: Window, new: Tensor, log_slope: Tensor, method: Method) -> Verdict:
    """As `jacobiflow.core.rows.accept`, which runs where C does not know the rule, the type or the layout."""
    lib, (n, length, dim) = library(), rows.z.shape
    sequences, slopes = (rows.z, rows.guess, rows.seen, rows.answer), rows.log_slope
    plain = all(t.dtype == torch.float32 and t.stride(2) == 1 and t.stride(1) == dim for t in sequences)
    if lib is None or not backends_know(method) or not plain or new.dtype != torch.float32:
        return in_torch(rows, window, new, log_slope, method)
    new, log_slope = new.contiguous(), log_slope.contiguous()
    (here, beyond), largest = torch.empty(2, n, dtype=torch.bool), torch.empty(n, dtype=torch.float64)
    counts = rows.frontier, rows.sweeps, rows.evaluated, rows.status, rows.change
    sweep = _Sweep(
        *(n, length, dim, *(t.stride(0) for t in (*sequences, slopes))),
        *(t.data_ptr() for t in (*sequences, slopes, *counts)),
        *(method.tol, ROUNDING * torch.finfo(torch.float32).eps, method.unit == "relative", method.width is None),
        *(here.data_ptr(), beyond.data_ptr(), largest.data_ptr()),
    )
    starts = torch.as_tensor(window.start).contiguous()
    where = addressof(sweep), starts.data_ptr(), starts.ndim, window.width, rows.width
    lib.jf_accept(*where, new.data_ptr(), log_slope.data_ptr(), rows.cache is not None)
    low, high, count, overflowed = sweep.summary
    return Verdict(here, beyond, largest, Look(low, high, count, bool(overflowed)))


@dataclass(frozen=True)
class CEngine(Engine):
    """A network and an elementwise map in C. For decoding: gradients go through the conditioner."""

    map: CMap
    name = "c"

    accept = staticmethod(accept)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.map.inverse(z, theta)
