"""`accept` of core/rows.py in C: what a sweep made final, in one call."""

from __future__ import annotations

import ctypes
from ctypes import addressof, c_float, c_int, c_int64, c_long, c_void_p

import torch
from torch import Tensor

from jacobiflow.core.method import Method
from jacobiflow.core.rows import Look, Rows, Verdict, Window
from jacobiflow.core.rows import accept as in_torch
from jacobiflow.core.stopping import ROUNDING, describe
from jacobiflow.kernels.build import library


class _Rows(ctypes.Structure):
    _fields_ = [
        *((name, c_long) for name in ("n", "length", "dim")),
        *((name, c_void_p) for name in ("z", "guess")),
        *((name, c_long) for name in ("z_row", "guess_row")),
        *((name, c_void_p) for name in ("seen", "answer", "log_slope")),
        *((name, c_long) for name in ("seen_row", "answer_row", "log_slope_row")),
        *((name, c_void_p) for name in ("frontier", "sweeps", "evaluated", "status", "change")),
    ]


class _Rule(ctypes.Structure):
    _fields_ = [("tol", c_float), ("rounding", c_float), ("relative", c_int), ("whole", c_int)]


class _Found(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in ("here", "beyond", "largest")), ("summary", c_int64 * 4)]


def accept(
    rows: Rows, window: Window, width: int, new: Tensor, log_slope: Tensor, method: Method, *, cached: bool
) -> Verdict:
    """As `jacobiflow.core.rows.accept`, which runs where C does not know the rule, the type or the layout."""
    lib, rule = library(), describe(method)
    sequences = (rows.z, rows.guess, rows.seen, rows.answer)
    n, length, dim = rows.z.shape
    plain = all(t.dtype == torch.float32 and t.stride(2) == 1 and t.stride(1) == dim for t in sequences)
    if lib is None or rule is None or not plain or new.dtype != torch.float32:
        return in_torch(rows, window, width, new, log_slope, method, cached=cached)
    new, log_slope = new.contiguous(), log_slope.contiguous()
    here, beyond = torch.empty(n, dtype=torch.bool), torch.empty(n, dtype=torch.bool)
    largest = torch.empty(n, dtype=torch.float64)
    given = _Rows(
        *(n, length, dim, rows.z.data_ptr(), rows.guess.data_ptr(), rows.z.stride(0), rows.guess.stride(0)),
        *(rows.seen.data_ptr(), rows.answer.data_ptr(), rows.log_slope.data_ptr()),
        *(rows.seen.stride(0), rows.answer.stride(0), rows.log_slope.stride(0)),
        *(t.data_ptr() for t in (rows.frontier, rows.sweeps, rows.evaluated, rows.status, rows.change)),
    )
    how = _Rule(rule.tol, ROUNDING * torch.finfo(torch.float32).eps, rule.unit == "relative", rule.whole)
    found = _Found(here.data_ptr(), beyond.data_ptr(), largest.data_ptr())
    one, starts = (window.start, None) if isinstance(window.start, int) else (0, window.start.contiguous())
    lib.jf_accept(
        *(addressof(given), addressof(how), addressof(found)),
        *(0 if starts is None else starts.data_ptr(), one, window.width, width),
        *(new.data_ptr(), log_slope.data_ptr(), cached),
    )
    low, high, count, overflowed = found.summary
    return Verdict(here, beyond, largest, Look(low, high, count, bool(overflowed)))
