"""Failures: which samples get a narrower window, and which are given up."""

from __future__ import annotations

import torch
from torch import Tensor

from jacobiflow.core.method import Method
from jacobiflow.core.results import OnFailure
from jacobiflow.core.rows import FELL_BACK, SWEEP_LIMIT, Rows, Verdict


def next_widths(rows: Rows, verdict: Verdict, width: int, method: Method, on_failure: OnFailure) -> Tensor:
    """The width [n] with which each row continues; rows whose width shrinks have left the batch.

    Overflow beyond the frontier halves the window: a shorter one reads fewer guesses. Overflow at the
    frontier may come from a later guess (0 * inf is NaN), so that one position at a time decides. Rows that
    have used up max_sweeps continue one position at a time, or end as they are.
    """
    widths = torch.full_like(rows.frontier, width)
    widths[verdict.overflows_beyond] = max(width // 2, 1)
    widths[verdict.overflows_here] = 1
    if method.max_sweeps is not None:
        spent = rows.moving & (rows.sweeps >= method.max_sweeps)
        if on_failure == "fallback":
            widths[spent] = 1
        else:
            rows.status = torch.where(spent, SWEEP_LIMIT, rows.status)
            rows.change = torch.where(spent, verdict.largest, rows.change)
    widths = torch.where(rows.moving, widths, width)
    rows.status = torch.where(widths < width, FELL_BACK, rows.status)
    return widths
