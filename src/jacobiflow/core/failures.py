"""Failures: which samples get a narrower window, and which are given up."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.core.method import Method
from jacobiflow.core.results import OnFailure
from jacobiflow.core.rows import FELL_BACK, SWEEP_LIMIT, Rows, Verdict


def regrouped(rows: Rows, verdict: Verdict, method: Method, on_failure: OnFailure) -> list[Rows]:
    """The rows that keep their width, and a group for each narrower width of the others.

    Overflow beyond the frontier halves the window: a shorter one reads fewer guesses. Overflow at the frontier may
    come from a later guess (0 * inf is NaN), so that one position at a time decides. Rows that have used up
    max_sweeps continue one position at a time, or end as they are.
    """
    widths = torch.full_like(rows.frontier, rows.width)
    widths[verdict.overflows_beyond] = max(rows.width // 2, 1)
    widths[verdict.overflows_here] = 1
    if method.max_sweeps is not None:
        spent = rows.moving & (rows.sweeps >= method.max_sweeps)
        if on_failure == "fallback":
            widths[spent] = 1
        else:
            rows.status = torch.where(spent, SWEEP_LIMIT, rows.status)
            rows.change = torch.where(spent, verdict.largest, rows.change)
    widths = torch.where(rows.moving, widths, rows.width)
    rows.status = torch.where(widths < rows.width, FELL_BACK, rows.status)
    narrower = set(widths.tolist()) - {rows.width}
    if not narrower:
        return [rows]
    return [rows.take(widths == rows.width), *(narrowed(rows, widths == width, width) for width in narrower)]


def narrowed(rows: Rows, where: Tensor, width: int) -> Rows:
    """The rows of a mask [n], ready to continue from their own frontiers with a narrower window."""
    fewer = rows.take(where)
    fewer.width, padding = width, rows.length + width - rows.seen.shape[1]
    fewer.seen, fewer.answer = (F.pad(t, (0, 0, 0, padding)) for t in (fewer.seen, fewer.answer))
    fewer.log_slope = F.pad(fewer.log_slope, (0, padding))
    if fewer.cache is not None:
        fewer.cache.zero_nonfinite()
    if width == 1:  # zeros in place of guesses, which may be what overflows
        beyond = torch.arange(fewer.seen.shape[1], device=fewer.seen.device) >= fewer.frontier[:, None]
        fewer.seen = fewer.seen.masked_fill(beyond[..., None], 0)
    return fewer
