"""Paired bootstrap: how much FID and KID change from one decoder to another on the same noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from jacobiflow_lab.metrics.fid import fid_of
from jacobiflow_lab.metrics.moments import Moments

LEVEL = 0.95  # of intervals


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change and its interval, relative to the value that it starts from."""

    value: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half of the interval, its wider half."""
        return max(self.high - self.value, self.value - self.low)


def paired_changes(
    real: Moments, before: Tensor, after: Tensor, *, fid: bool = True, resamples: int = 100, seed: int = 0
) -> dict[str, Change | None]:
    """Relative changes of FID and KID from features `before` [N, D] to `after`: row i of both has one noise.

    Each resample draws N rows with replacement, the same ones of both; the real images stay. The bias of FID
    at N samples is in both and largely cancels. None: the first KID is not positive. fid: False: only KID.
    """
    n = len(before)
    draw = torch.Generator().manual_seed(seed)
    draws = [torch.arange(n), *torch.randint(n, (resamples, n), generator=draw)]
    found: dict[str, Change | None] = {"kid": _change(draws, kid_of_rows(real, before), kid_of_rows(real, after))}
    if fid:
        found["fid"] = _change(
            draws, lambda rows: fid_of(real, before[rows]).value, lambda rows: fid_of(real, after[rows]).value
        )
    return found


def _change(draws: list[Tensor], before: Callable[[Tensor], float], after: Callable[[Tensor], float]) -> Change | None:
    """The relative change over all rows, which are the first draw, and the interval over the others."""
    first = [before(rows) for rows in draws]
    if first[0] <= 0:
        return None
    value, *others = [(after(rows) - a) / first[0] for rows, a in zip(draws, first, strict=True)]
    edge = (1 - LEVEL) / 2
    low, high = torch.tensor(others or [value]).double().quantile(torch.tensor([edge, 1 - edge]).double()).tolist()
    return Change(value=value, low=low, high=high)


def kid_of_rows(real: Moments, features: Tensor) -> Callable[[Tensor], float]:
    """The unbiased kernel distance of chosen rows of features [N, D] from all real ones.

    A row that is chosen several times is one sample with a weight: pairs of it with itself do not count.
    """

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    x, r = features.double(), real.features.double()
    own, cross, m = kernel(x, x), kernel(x, r).mean(1), len(r)
    diagonal, known = own.diagonal(), kernel(r, r)
    fixed = (known.sum() - known.diagonal().sum()) / (m * (m - 1))

    def kid(rows: Tensor) -> float:
        w = torch.bincount(rows, minlength=len(x)).double()
        pairs = w.sum().square() - w.square().sum()
        return float(((w @ own @ w) - w.square() @ diagonal) / pairs + fixed - 2 * (w @ cross) / w.sum())

    return kid
