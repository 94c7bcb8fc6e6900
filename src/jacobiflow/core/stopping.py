"""When a position may count as solved: how far it moved in a sweep, in which unit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jacobiflow.core.method import Method, Unit

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


@dataclass(frozen=True)
class Rule:
    """The rule of `judge` as plain data, for backends that evaluate it themselves."""

    tol: float
    unit: Unit
    whole: bool  # no width: only positions that stand still are final, until all changes are small


def describe(method: Method) -> Rule | None:
    """The rule of a method; None for a rule that only `judge` knows, which no backend may replace."""
    return Rule(method.tol, method.unit or "absolute", method.width is None)


@dataclass(frozen=True)
class Decision:
    """What a sweep decided, per row; tensors are [n]."""

    advance: Tensor  # positions that became final
    loose: Tensor  # whether one of them was accepted within tol, not to rounding
    accepted: Tensor  # the largest change among those; else 0
    largest: Tensor  # the largest change in the window
    overflows_here: Tensor  # whether the first position of the window is not finite
    overflows_beyond: Tensor  # whether only a later one is not finite


def judge(change: Tensor, still: Tensor, own: Tensor, method: Method, at_end: Tensor) -> Decision:
    """Which positions a sweep made final. change, still, own: [n, w], from `changes`; NaN is not finite.

    own: the positions of each row's window, one run per row. at_end: [n], whether it ends with the sequence.
    Positions are final as long as they and all before them changed little; the next one is final too, because
    its inputs are. A position that is not finite is never final. Windows accept small changes. Without a
    width only positions that stand still are accepted, until all changes are small (Algorithm 1).
    """
    finite = ~change.isnan()
    small = still | (change <= method.tol)
    if method.width is None:
        small = still | ((small | ~own).all(1) & at_end)[:, None]
    before = own.long().cumsum(1) == 0  # positions ahead of the window
    skipped = before.sum(1)
    run = (before | (small & own)).long().cumprod(1).sum(1) - skipped
    last = (skipped + run).clamp_max(own.shape[1] - 1)[:, None]
    advance = torch.minimum(run + finite.gather(1, last)[:, 0], own.sum(1))
    place = torch.arange(own.shape[1], device=own.device) - skipped[:, None]
    loose = (own & ~still & (place < advance[:, None] - 1)).any(1)
    accepted = torch.where(own & (place < run[:, None]) & loose[:, None], change, 0).amax(1)
    largest = torch.where(own & finite, change, 0).amax(1)
    bad = own & ~finite
    here = (bad & (place == 0)).any(1)
    return Decision(advance, loose, accepted, largest, here, bad.any(1) & ~here)
