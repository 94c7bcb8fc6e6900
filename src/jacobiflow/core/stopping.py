"""When a position may count as solved: how far it moved in a sweep, in which unit."""

from __future__ import annotations

from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor

from jacobiflow.core.method import Method

ROUNDING = 8  # units in the last place within which a position stands still


def changes(new: Tensor, seen: Tensor, z: Tensor, log_slope: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    """How far each position moved from `seen` to `new`, and whether it stands still; both [n, w].

    All arguments are [n, w, D]; log_slope is log |dx/dz| at `new`. Elementwise, with d = |new - seen|:
        absolute: the change is d, still is d <= 8 eps max(1, |x|);
        relative: the change is d / u with u = max(|x|, |z dx/dz|), still is d <= 8 eps u.
    A position takes the largest change of its D numbers and is still if all of them are. If it is not finite,
    its change is NaN. Where |z dx/dz| overflows, u is |x|. Where u is 0, only d = 0 is small.
    """
    d, size = (new - seen).abs(), new.abs()
    rounding, largest = ROUNDING * torch.finfo(new.dtype).eps, torch.finfo(new.dtype).max
    if method.unit == "relative":
        reach = z.abs() * log_slope.exp()
        size = torch.where(reach <= largest, torch.maximum(size, reach), size)
        change = torch.where(d == 0, d, d / size).clamp_max(largest)
    else:
        change, size = d, size.clamp_min(1)
    finite = d.isfinite()
    return torch.where(finite, change, float("nan")).amax(-1), (finite & (d <= rounding * size)).all(-1)


def backends_know(method: Method) -> bool:
    """Whether a backend may evaluate `changes` and `judge` itself: there is no setting that is not listed here."""
    return {f.name for f in fields(method)} <= {"width", "tol", "max_sweeps", "init", "unit", "precision"}


class Decision(NamedTuple):
    """What a sweep decided, per row; tensors are [n] but for `unsettled`."""

    advance: Tensor  # positions that became final
    loose: Tensor  # whether one of them was accepted within tol, not to rounding
    accepted: Tensor  # the largest change among those; else 0
    largest: Tensor  # the largest change in the window
    unsettled: Tensor  # [n, w], positions that the network sees anew: not final, or the last that became it
    overflows_here: Tensor  # whether the first position of the window is not finite
    overflows_beyond: Tensor  # whether only a later one is not finite


def judge(change: Tensor, still: Tensor, own: Tensor, method: Method, at_end: Tensor) -> Decision:
    """Which positions a sweep made final. change, still: [n, w], from `changes`; NaN is not finite.

    own: [n, w], the positions of each row's window, one run per row. at_end: [n], whether it ends with the sequence.
    Positions are final as long as they and all before them changed little; the next one is final too, because its
    inputs are. What is not finite is never final. Windows accept changes within tol. Without a width only positions
    that stand still are accepted, until all changes are small (Algorithm 1).
    """
    count = own.sum(1)
    place = own.cumsum(1) - 1  # of each position in its row's window
    lost = change.isnan()
    flags = torch.stack((~still, ~(still | (change <= method.tol)), lost)) & own
    moved, large, bad = torch.where(flags, place, count[:, None]).amin(-1)  # the first of each kind, or count
    run = large if method.width is not None else torch.where((large == count) & at_end, count, moved)
    advance = torch.minimum(run + 1, bad)
    loose = moved < advance - 1
    accepted = torch.where(own & (place < run[:, None]) & loose[:, None], change, 0).amax(1)
    largest, unsettled = torch.where(own & ~lost, change, 0).amax(1), own & (place >= advance[:, None] - 1)
    return Decision(advance, loose, accepted, largest, unsettled, (bad == 0) & (count > 0), (bad > 0) & (bad < count))
