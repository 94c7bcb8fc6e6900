"""The elementwise maps of the C kernels, matched by the formulas that bijectors describe."""

from __future__ import annotations

from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.bijectors import Bijector, Formula, description
from jacobiflow.kernels.build import library
from jacobiflow.kernels.c_library import codes_of

AFFINE = ("exp", "softplus", "sigmoid")  # the maps of jf_affine
FLOORED = ("softplus", "sigmoid")  # without a floor these scales may be subnormal, which C takes no log of


@dataclass(frozen=True)
class CMap:
    """A bijector and how the C kernels know it."""

    bijector: Bijector
    formula: Formula
    code: int

    @cached_property
    def numbers(self) -> Any:
        """The formula's numbers as C takes them."""
        return (c_float * max(len(self.formula.numbers), 2))(*self.formula.numbers)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        """x and log |dx/dz| [n, w, d] of theta [n, w, P d]: affine maps by C, all others by torch."""
        lib, (n, w, d) = library(), z.shape
        plain = z.dtype == theta.dtype == torch.float32 and theta.shape == (n, w, 2 * d)
        if lib is None or self.formula.kind not in AFFINE or not plain:
            return self.bijector.inverse(z, theta)
        z = z if z.stride(2) == 1 and z.stride(1) == d else z.contiguous()
        theta, x, log_slope = theta.contiguous(), z.new_empty(n, w, d), z.new_empty(n, w, d)
        lib.jf_affine(
            *(self.code, self.numbers[0], n, w, d, z.data_ptr(), z.stride(0)),
            *(theta.data_ptr(), x.data_ptr(), log_slope.data_ptr()),
        )
        return x, log_slope


def c_map(bijector: Bijector) -> CMap | None:
    """The map of the C kernels with this bijector's formula, if there is one."""
    formula, lib = description(bijector), library()
    if type(formula) is not Formula or lib is None:
        return None
    code = codes_of(lib)[0].get((formula.kind, len(formula.numbers)))
    if code is None or (formula.kind in FLOORED and formula.numbers[0] < torch.finfo(torch.float32).tiny):
        return None
    return CMap(bijector, formula, code)
