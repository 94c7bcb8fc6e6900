"""When a position may count as solved: how far it moved in a sweep, in which unit."""

from __future__ import annotations

import torch
from torch import Tensor

from jacobiflow.core import native
from jacobiflow.core.types import Unit

ROUNDING = 8  # units in the last place within which a position stands still


def changes(new: Tensor, seen: Tensor, z: Tensor, log_slope: Tensor, unit: Unit) -> tuple[Tensor, Tensor]:
    """How far each position moved from `seen` to `new`, and whether it stands still; both [n, w].

    All arguments are [n, w, D]; log_slope is log |dx/dz| at `new`. Elementwise, with d = |new - seen|:
        absolute: the change is d, still is d <= 8 eps max(1, |x|);
        relative: the change is d / u with u = max(|x|, |z dx/dz|), still is d <= 8 eps u.
    A position takes the largest change of its D numbers and is still if all of them are. A change within
    `tol` is small. A position that is not finite has the change NaN: it is neither small nor still.
    Where |z dx/dz| overflows, u is |x|. Where u is 0, only d = 0 is small.

    >>> x = torch.tensor([[[2e-6], [1.0]]])
    >>> change, still = changes(x, x + 1e-7, torch.zeros_like(x), torch.zeros_like(x), "relative")
    >>> [f"{c:.0e}" for c in change[0].tolist()], still.tolist()
    (['5e-02', '1e-07'], [[False, True]])
    """
    d, size = (new - seen).abs(), new.abs()
    rounding, largest = ROUNDING * torch.finfo(new.dtype).eps, torch.finfo(new.dtype).max
    if unit == "relative":
        reach = z.abs() * log_slope.exp()
        size = torch.where(reach <= largest, torch.maximum(size, reach), size)
        change = torch.where(d == 0, d, d / size).clamp_max(largest)
    else:
        change, size = d, size.clamp_min(1)
    finite = d.isfinite()
    change = torch.where(finite, change, float("nan")).amax(-1)
    return change, (finite & (d <= rounding * size)).all(-1)


def compare(new: Tensor, seen: Tensor, z: Tensor, log_slope: Tensor, unit: Unit) -> tuple[Tensor, Tensor]:
    """For each row the largest change, and how many leading positions stand still, as `changes` has them.

    The results are on the CPU: this is the one host synchronisation of a sweep.
    """
    rounding = ROUNDING * torch.finfo(new.dtype).eps
    scale = (z, log_slope) if unit == "relative" else None
    found = native.compare(new, seen, scale, rounding)
    if found is not None:
        return found
    change, still = changes(new, seen, z, log_slope, unit)
    update, count = change.amax(1), still.cumprod(1).sum(1)
    if new.is_cpu:
        return update, count
    report = torch.stack((update.double(), count.double())).cpu()
    return report[0], report[1].long()
