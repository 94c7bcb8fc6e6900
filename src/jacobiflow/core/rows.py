"""Rows: the samples that are being solved, each with its own frontier; the noise and the guesses they begin from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.core.block import Block, Cache, Guess, Start, take
from jacobiflow.core.method import Init, Method
from jacobiflow.core.results import Status
from jacobiflow.core.stopping import changes, judge

Noise = Literal["gaussian", "dequantize", "binary", "none"]  # of training data: see `data.transforms.prepare`
EXACT, CONVERGED, FELL_BACK, SWEEP_LIMIT, NONFINITE = (status.rank for status in Status)


@dataclass(frozen=True)
class Look:
    """What the host knows of the rows: the one read of a sweep."""

    low: int  # the lowest frontier of rows that still move
    high: int  # the highest
    count: int  # rows that still move
    overflowed: bool = False  # whether any row overflowed in the sweep


class Verdict(NamedTuple):
    """What became of the rows in a sweep."""

    overflows_here: Tensor  # [n], whether the position at the frontier was not finite
    overflows_beyond: Tensor  # [n], whether only a later one was not finite
    largest: Tensor  # [n], the largest change in the window
    look: Look


class Window(NamedTuple):
    """The positions that a sweep computes: `width` of them from `start` on, one for all rows or one each."""

    start: Start
    width: int

    def put(self, t: Tensor, values: Tensor, where: Tensor) -> None:
        """values [n, width, ...] into t where `where` [n, width] says so; t has room for padding."""
        if values.ndim == 3:
            where = where[..., None]
        if isinstance(self.start, int):
            part = t[:, self.start : self.start + self.width]
            part.copy_(torch.where(where, values, part))
        else:
            at = self.start[:, None] + torch.arange(self.width, device=t.device)
            at = at.view_as(where).expand_as(values)
            t.scatter_(1, at, torch.where(where, values, t.gather(1, at)))


@dataclass
class Rows:
    """Samples that are swept together, a row each. Padding lets windows of one width fit everywhere."""

    block: Block
    width: int  # positions of their windows
    place: Tensor  # [n], where they stand in the batch
    z: Tensor  # [n, T, D]
    guess: Tensor  # [n, T, D], where sweeps begin
    seen: Tensor  # [n, T + padding, D], what the network is evaluated on; final below the frontier
    answer: Tensor  # [n, T + padding, D], one sweep applied to `seen`
    log_slope: Tensor  # [n, T + padding], log |dx/dz| of that sweep
    frontier: Tensor  # [n], how many positions are final
    sweeps: Tensor  # [n]
    evaluated: Tensor  # [n], inputs that went through the network
    change: Tensor  # [n], the largest change that was accepted within tol, or left at max_sweeps
    status: Tensor  # [n], ranks of Status
    guess_sweeps: Tensor  # [n], in bfloat16, for the first guess
    cache: Cache | None = None  # what the network keeps of final positions

    @classmethod
    def start(cls, block: Block, z: Tensor, guess: Tensor, width: int, cache: Cache | None = None) -> Rows:
        """Rows without known positions; noise that is not finite has no answer. With width 1 `guess` is written to."""
        n, length, _ = z.shape
        padding = 0 if width in (1, length) else width
        seen = guess if width == 1 else F.pad(guess, (0, 0, 0, padding))
        answer, slopes = seen if width == 1 else seen.clone(), z.new_zeros(n, length + padding)
        place, change = torch.arange(n, device=z.device), z.new_zeros(n, dtype=torch.float64)
        frontier, sweeps, evaluated, status, guess_sweeps = place.new_zeros(5, n).unbind()
        if not math.isfinite(z.sum()):
            status = torch.where(z.isfinite().flatten(1).all(1), EXACT, NONFINITE)
        counts = frontier, sweeps, evaluated, change, status, guess_sweeps
        return cls(block, width, place, z, guess, seen, answer, slopes, *counts, cache)

    def __len__(self) -> int:
        return self.z.shape[0]

    @property
    def length(self) -> int:
        return self.z.shape[1]

    @property
    def x(self) -> Tensor:
        """`seen` without padding."""
        return self.seen[:, : self.length]

    @property
    def moving(self) -> Tensor:
        """[n], which rows are not solved yet."""
        return (self.frontier < self.length) & (self.status < SWEEP_LIMIT)

    def take(self, where: Tensor) -> Rows:
        """A copy of the rows of a mask [n]."""
        keep = where.nonzero()[:, 0]
        cache = None if self.cache is None else self.cache.select(keep)
        found: dict[str, Any] = {name: getattr(self, name)[keep] for name in TENSORS}
        return replace(self, block=self.block.select(keep), cache=cache, **found)

    def parted(self) -> tuple[list[Rows], Rows]:
        """The rows that are solved, if there are any, without a cache; and those that move."""
        moving = self.moving
        if bool(moving.all()):
            return [], self
        return [replace(self, cache=None).take(~moving)], self.take(moving)

    @classmethod
    def joined(cls, parts: Sequence[Rows]) -> Rows:
        """The results of some rows in the order of their places."""
        if len(parts) == 1:
            return parts[0]
        order, length = torch.cat([rows.place for rows in parts]).argsort(), parts[0].length
        every = {name: [getattr(rows, name) for rows in parts] for name in TENSORS}
        without_padding = {name: [t[:, :length] if t.ndim > 1 else t for t in ts] for name, ts in every.items()}
        found: dict[str, Any] = {name: torch.cat(ts)[order] for name, ts in without_padding.items()}
        return replace(parts[0], cache=None, **found)

    def look(self, overflows: Tensor | None = None) -> Look:
        """The rows that move now. overflows: [n], those that overflowed in the last sweep."""
        if not len(self):
            return Look(self.length, 0, 0)
        moving = self.moving
        lows, highs = torch.where(moving, self.frontier, self.length), torch.where(moving, self.frontier, 0)
        lost = moving.new_zeros(()) if overflows is None else overflows.any()
        low, high, count, overflowed = torch.stack((lows.amin(), highs.amax(), moving.sum(), lost)).tolist()
        return Look(low, high, count, bool(overflowed))

    def window(self, look: Look) -> Window:
        """From the frontiers on; from the lowest, without gathering, if windows end with the sequence anyway."""
        if look.low + self.width >= self.length or look.low == look.high:
            return Window(look.low, min(self.width, self.length - look.low))
        return Window(self.frontier.clamp_max(self.length - 1), self.width)

    def finish(self, start: int, stop: int) -> None:
        """Positions start .. stop - 1 were solved one after the other, in `seen`."""
        found, known = self.seen[:, start:stop], torch.full_like(self.frontier, stop - start)
        if not math.isfinite(found.sum()):  # else all of them are finite, and no look at each is needed
            known = found.isfinite().all(-1).long().cumprod(1).sum(1)
            self.status = torch.where(known < stop - start, NONFINITE, self.status)
        self.answer[:, start:stop] = found
        steps = (known + start + 1).clamp_max(stop) - max(start, 1)
        inputs = steps if self.cache is not None else steps * (2 * max(start, 1) + steps - 1) // 2
        self.sweeps, self.evaluated = self.sweeps + steps, self.evaluated + inputs
        self.frontier = start + known


TENSORS = tuple(f.name for f in fields(Rows) if f.type == "Tensor")


def accept(rows: Rows, window: Window, new: Tensor, log_slope: Tensor, method: Method) -> Verdict:
    """Take in the results of a sweep [n, window.width, D]: `answer` all of them, `seen` those that are not final.

    `seen` takes the last final one too: it has no cache entry yet. What is not finite returns to the first guess.
    """
    part = window.start, window.width
    start = window.start if isinstance(window.start, int) else window.start[:, None]
    at = start + torch.arange(window.width, device=new.device)
    own = (at >= rows.frontier[:, None]) & (at < rows.length) & rows.moving[:, None]  # what the sweep may change
    change, still = changes(new, take(rows.x, *part), take(rows.z, *part), log_slope, method)
    found = judge(change, still, own, method, rows.frontier + rows.width >= rows.length)
    finite = new.isfinite().all(-1)
    good, swept = own & finite, own.any(1)
    window.put(rows.answer, new, good)
    window.put(rows.log_slope, log_slope.sum(-1), good)
    window.put(rows.seen, torch.where(finite[..., None], new, take(rows.guess, *part)), found.unsettled)
    again = 0 if rows.cache is not None else swept * (rows.frontier - 1)  # inputs before the window
    rows.evaluated = rows.evaluated + own.sum(1) + again
    rows.sweeps = rows.sweeps + swept
    rows.change = torch.maximum(rows.change, found.accepted.double())
    rows.status = torch.where(found.loose, rows.status.clamp_min(CONVERGED), rows.status)
    rows.frontier = rows.frontier + found.advance
    here, beyond = found.overflows_here, found.overflows_beyond
    return Verdict(here, beyond, found.largest.double(), rows.look(here | beyond))


def first_guess(z: Tensor, init: Init | None, calibrated: Guess | None = None) -> Tensor:
    """Where sweeps begin: finite, and for each sample a function of that sample alone."""
    if init == "calibrated":
        if calibrated is None:
            raise ValueError("this flow has no calibrated first guess: run tune, or use init='previous'")
        z = calibrated[0].to(z) + calibrated[1].to(z) * z
    elif init == "zeros":
        return torch.zeros_like(z)
    elif init == "noise":
        noise = torch.randn(z.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        return noise.to(z).expand_as(z).contiguous()
    return torch.where(z.isfinite(), z, 0)


def row_noise(n: int, shape: tuple[int, ...], seed: int | None, start: int = 0) -> np.ndarray:
    """Rows start .. start + n - 1 of standard normal noise, [n, *shape]. Row i depends on (seed, i) only."""
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    rows = np.empty((n, *shape))
    for i in range(n):
        bits = np.random.Philox(key=np.array([key, start + i], dtype=np.uint64))
        np.random.Generator(bits).standard_normal(out=rows[i])
    return rows
