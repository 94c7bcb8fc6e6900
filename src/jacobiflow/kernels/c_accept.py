"""`accept` of core/rows.py in C: what a sweep made final, in one call."""

from __future__ import annotations

from ctypes import addressof

import torch
from torch import Tensor

from jacobiflow.core.method import Method
from jacobiflow.core.rows import Look, Rows, Verdict, Window
from jacobiflow.core.rows import accept as in_torch
from jacobiflow.core.stopping import ROUNDING, backends_know
from jacobiflow.kernels.build import library
from jacobiflow.kernels.c_library import structure

_Rows = structure(
    "L n length dim z_row guess_row seen_row answer_row log_slope_row "
    "P z guess seen answer log_slope frontier sweeps evaluated status change"
)
_Rule = structure("F tol rounding I relative whole")
_Found = structure("P here beyond largest Q summary")


def accept(rows: Rows, window: Window, new: Tensor, log_slope: Tensor, method: Method) -> Verdict:
    """As `jacobiflow.core.rows.accept`, which runs where C does not know the rule, the type or the layout."""
    lib, (n, length, dim) = library(), rows.z.shape
    sequences, slopes = (rows.z, rows.guess, rows.seen, rows.answer), rows.log_slope
    plain = all(t.dtype == torch.float32 and t.stride(2) == 1 and t.stride(1) == dim for t in sequences)
    if lib is None or not backends_know(method) or not plain or new.dtype != torch.float32:
        return in_torch(rows, window, new, log_slope, method)
    new, log_slope = new.contiguous(), log_slope.contiguous()
    here, beyond = torch.empty(n, dtype=torch.bool), torch.empty(n, dtype=torch.bool)
    largest = torch.empty(n, dtype=torch.float64)
    counts = rows.frontier, rows.sweeps, rows.evaluated, rows.status, rows.change
    strides = (t.stride(0) for t in (*sequences, slopes))
    given = _Rows(n, length, dim, *strides, *(t.data_ptr() for t in (*sequences, slopes, *counts)))
    how = _Rule(method.tol, ROUNDING * torch.finfo(torch.float32).eps, method.unit == "relative", method.width is None)
    found = _Found(here.data_ptr(), beyond.data_ptr(), largest.data_ptr())
    one, starts = (window.start, None) if isinstance(window.start, int) else (0, window.start.contiguous())
    lib.jf_accept(
        *(addressof(given), addressof(how), addressof(found)),
        *(0 if starts is None else starts.data_ptr(), one, window.width, rows.width),
        *(new.data_ptr(), log_slope.data_ptr(), rows.cache is not None),
    )
    low, high, count, overflowed = found.summary
    return Verdict(here, beyond, largest, Look(low, high, count, bool(overflowed)))
