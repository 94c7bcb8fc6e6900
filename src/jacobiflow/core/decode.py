"""The window loop: the inverse of any Block by parallel sweeps inside successive windows.

A sweep updates all positions t of a window at once from the current guess:
    x_t <- f^-1(z_t; theta_t(x_{<t}))
The first position of a window is exact after one sweep, the second after two, and so on, from
any finite guess; a window of one position is sequential decoding, a window over the whole
sequence is Jacobi's method (Algorithm 1 of Zhang et al., 2026).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jacobiflow.core import native
from jacobiflow.core.stopping import compare
from jacobiflow.core.types import (
    ON_FAILURE,
    STATUSES,
    Block,
    BlockStats,
    Cache,
    Decoded,
    DecodingError,
    Init,
    Method,
    OnFailure,
    Stats,
    Status,
    Sweep,
    Watcher,
)

STRIKES = 3  # overflowing sweeps after which a sample is solved again with a narrower width
CHECK_EVERY = 16  # positions between looks at whether sequentially decoded samples are finite
COMPACT_AT = 7 / 8  # converged rows leave the batch when this share or less is still moving
EXACT, CONVERGED, FELL_BACK, SWEEP_LIMIT, NONFINITE = (s.rank for s in Status)


def sequential(block: Block, z: Tensor) -> Decoded:
    """Invert `block` exactly, one position at a time with a cached prefix. z: [N, T, D]."""
    return decode(block, z, Method(width=1))


def jacobi(block: Block, z: Tensor, *, tol: float, max_sweeps: int | None = None) -> Decoded:
    """Invert `block` by sweeps over the whole sequence until a sample's update is <= tol."""
    return decode(block, z, Method(width=None, tol=tol, max_sweeps=max_sweeps))


def windowed(block: Block, z: Tensor, *, width: int, tol: float, max_sweeps: int | None = None) -> Decoded:
    """Invert `block` by parallel sweeps inside successive windows of `width` positions.

    A window is exact after as many sweeps as it has positions; `tol` bounds a sample's last
    update, not its error. width=1 is sequential decoding, width=block.length is Jacobi's.
    """
    return decode(block, z, Method(width=width, tol=tol, max_sweeps=max_sweeps))


def decode(
    block: Block,
    z: Tensor,
    method: Method,
    *,
    on_failure: OnFailure = "fallback",
    cache: bool = True,
    compact_at: float = COMPACT_AT,
    name: int = 0,
    watch: Watcher | None = None,
) -> Decoded:
    """x with z = block(x), solved as `method` says. z: [N, T, D], never written to.

    on_failure: samples that overflow or reach max_sweeps are solved again with a narrower width
    ("fallback"), reported as a DecodingError that names block `name` ("raise"), or handed back
    as they are ("return"). A sample whose exact answer overflows raises only with "raise".
    cache: keep what the conditioner computed for settled positions; False trades time for memory.
    compact_at: stopped rows leave the batch when this share of it or less still moves; 0 keeps them in it.
    watch: called with the first guess and after every sweep over the batch, which is then solved in one part;
        not for samples that are solved again with a narrower width.
    """
    if on_failure not in ON_FAILURE:
        raise ValueError(f"on_failure must be one of {', '.join(ON_FAILURE)}, not {on_failure!r}")
    if z.ndim != 3 or z.shape[1] != block.length:
        raise ValueError(f"z must be [N, {block.length}, D], not {list(z.shape)}")
    began = time.perf_counter()
    with torch.inference_mode(), native.alone(z[: block.rows]):
        parts = _parts(block, z.detach()) if watch is None else iter([(block, z.detach())])
        options = _Options(method, on_failure, cache, compact_at, name, watch)
        runs = [_Run(part, rows, options) for part, rows in parts]
        for run in runs:
            run.solve()
    seconds = time.perf_counter() - began
    # Tensors joined outside inference mode are ordinary ones, which autograd may use.
    stats = BlockStats(
        sweeps=torch.cat([run.sweeps for run in runs]),
        evaluated=torch.cat([run.evaluated for run in runs]),
        update=torch.cat([run.update for run in runs]),
        status=tuple(map(STATUSES.__getitem__, torch.cat([run.code for run in runs]).tolist())),
        seconds=seconds,
    )
    if on_failure == "raise" and stats.worst.failed:
        failed = [i for i, status in enumerate(stats.status) if status.failed]
        raise DecodingError(name, failed, stats.worst)
    log_det = torch.cat([run.slope for run in runs]).sum(1)
    return Decoded(
        x=torch.cat([run.x for run in runs]),
        log_det=log_det,
        stats=Stats(blocks=(stats,), seconds=seconds),
    )


def _parts(block: Block, z: Tensor) -> Iterator[tuple[Block, Tensor]]:
    """The batch in as many parts as the block likes to solve it in, each with its share of the block."""
    count = -(-len(z) // max(block.rows or len(z), 1))
    if count <= 1:
        yield block, z
        return
    for places in torch.arange(len(z), device=z.device).tensor_split(count):
        yield block.select(places), z[places]


def first_guess(z: Tensor, init: Init) -> Tensor:
    """Where sweeps begin; finite, and for each sample a function of that sample alone."""
    if init == "zeros":
        return torch.zeros_like(z)
    if init == "noise":
        draw = torch.Generator().manual_seed(0)
        noise = torch.randn(z.shape[1:], generator=draw, dtype=torch.float64)
        return noise.to(z).expand_as(z).contiguous()
    if z.is_cpu and all_finite(z):  # a device would be waited for
        return z.clone(memory_format=torch.contiguous_format)
    return torch.where(z.isfinite(), z, 0)


def all_finite(x: Tensor) -> bool:
    """Whether all numbers are finite. Nearly always their sum tells, in one pass; it may overflow, too."""
    return math.isfinite(x.sum()) or bool(x.isfinite().all())


def narrower(width: int) -> int:
    """The next width to try when sweeps of this width fail; 1 cannot fail."""
    return width // 8 if width > 16 else 1


@dataclass
class _Rows:
    """Some rows of the batch with all that a sweep of them needs."""

    places: Tensor  # where they stand in the whole batch, on the CPU
    block: Block
    cache: Cache | None
    z: Tensor
    x: Tensor
    slope: Tensor  # log |dx_t/dz_t|, summed over D

    def __len__(self) -> int:
        return len(self.z)

    def take(self, keep: Tensor) -> _Rows:
        """A copy of the rows numbered in `keep` (on the CPU)."""
        rows = keep.to(self.z.device)
        return _Rows(
            self.places[keep],
            self.block.select(rows),
            None if self.cache is None else self.cache.select(rows),
            self.z[rows],
            self.x[rows],
            self.slope[rows],
        )

    def evaluate(self, lo: int, hi: int) -> tuple[Tensor, Tensor]:
        """New values and log |dx/dz| of positions lo .. hi - 1, both [n, hi - lo, D]."""
        theta = self.block.params(self.x, lo, hi, self.cache)
        return self.block.inverse(self.z[:, lo:hi], theta)

    def single(self, lo: int, hi: int) -> Tensor | None:
        """Positions lo .. hi - 1 of x solved one after the other in one call, and their slopes; None where
        the block does not do that."""
        solve = getattr(self.block, "single", None)
        found: Tensor | None = None if solve is None else solve(self.x, self.z, lo, hi, self.cache)
        return found

    def settle(self, valid: int) -> None:
        """The first `valid` positions will not change; the cache beyond them is stale."""
        if self.cache is not None:
            self.cache.valid = min(self.cache.valid, valid)

    def cost(self, lo: int, hi: int) -> int:
        """Positions that a sweep of lo .. hi - 1 puts through the conditioner."""
        valid = 0 if self.cache is None else self.cache.valid
        return hi - 1 - min(valid, max(lo - 1, 0))


@dataclass(frozen=True)
class _Options:
    """How to solve; see `decode`."""

    method: Method
    on_failure: OnFailure
    cache: bool
    compact_at: float
    name: int
    watch: Watcher | None


class _Run:
    """One block's inversion: answers and counts for the whole batch, filled in by windows."""

    def __init__(self, block: Block, z: Tensor, options: _Options) -> None:
        self.block, self.z, self.options, self.method = block, z, options, options.method
        n, self.length, _ = z.shape
        self.width = min(self.method.width or self.length, self.length)
        self.x = first_guess(z, self.method.init)
        self.slope = z.new_zeros(n, self.length)
        self.sweeps = torch.zeros(n, dtype=torch.long)
        self.evaluated = torch.zeros(n, dtype=torch.long)
        self.update = torch.zeros(n, dtype=torch.float64)
        self.code = torch.full((n,), EXACT)
        self.gone = torch.zeros(n, dtype=torch.bool)  # rows that take no part in further windows
        self.again = torch.zeros(n, dtype=torch.bool)  # of those, the ones to solve narrower
        self.known = torch.full((n,), self.length)  # positions before the first non-finite one
        self.shown = 0  # calls of `watch`

    def solve(self) -> None:
        """Window after window; then the failed samples again, narrower."""
        n = len(self.z)
        if not all_finite(self.z):
            self.give_up((~self.z.isfinite().flatten(1).all(1)).nonzero()[:, 0].cpu(), 0)
        cache = self.block.new_cache(n) if self.options.cache else None
        rows = _Rows(torch.arange(n), self.block, cache, self.z, self.x, self.slope)
        rows = self.sequential(self.staying(rows), 0, 1)  # the first position is given: no sweep
        solve, step = (self.sequential, self.length) if self.width == 1 else (self.window, self.width)
        for lo in range(0, self.length, step):
            rows = solve(rows, max(lo, 1), min(lo + step, self.length))
        self.put(rows)
        self.fall_back(self.again.nonzero()[:, 0])
        if bool((self.code == NONFINITE).any()):  # no guess is sold as an answer
            unknown = (torch.arange(self.length) >= self.known[:, None]).to(self.x.device)
            self.x[unknown] = self.slope[unknown] = float("nan")

    def sequential(self, rows: _Rows, lo: int, hi: int) -> _Rows:
        """Positions lo .. hi - 1 one after the other, each exact; returns the rows that stay."""
        quick = None if self.options.watch is not None else rows.single(lo, hi)
        if quick is not None:
            rows.slope[:, lo:hi] = quick
            return self.solved(rows, lo, hi, hi - max(lo, 1))
        for begin in range(lo, hi, CHECK_EVERY):
            if not len(rows):
                break
            end, cost, slopes = min(begin + CHECK_EVERY, hi), 0, []
            for t in range(begin, end):
                cost += rows.cost(t, t + 1)
                theta = rows.block.params(rows.x, t, t + 1, rows.cache)
                rows.x[:, t : t + 1], slope = rows.block.inverse(rows.z[:, t : t + 1], theta)
                slopes.append(slope)
                if self.options.watch is not None:
                    self.show(self.options.watch, rows, rows.places, t, t + 1)
            rows.slope[:, begin:end] = _total(torch.cat(slopes, 1))
            rows = self.solved(rows, begin, end, cost)
        return rows

    def solved(self, rows: _Rows, lo: int, hi: int, cost: int) -> _Rows:
        """Positions lo .. hi - 1 are there; returns the rows in which they are finite."""
        self.sweeps[rows.places] += hi - max(lo, 1)
        self.evaluated[rows.places] += cost
        if all_finite(rows.x[:, lo:hi]):
            return rows
        finite = rows.x[:, lo:hi].isfinite().all(-1).cpu()
        whole = finite.all(1)
        self.give_up(rows.places[~whole], lo + 1 + finite[~whole].long().cumprod(1).sum(1))
        return self.staying(rows)

    def window(self, rows: _Rows, lo: int, hi: int) -> _Rows:
        """Sweeps over positions lo .. hi - 1 until each row stops; returns the rows that stay."""
        now = rows  # the rows in the sweep, those `moving` not stopped yet; whole: all of them
        moving, whole = torch.ones(len(now), dtype=torch.bool), True
        strikes = torch.zeros(len(now), dtype=torch.long)
        update = moving.double()
        unit = self.method.unit or "absolute"
        start, swept, cost = lo, 0, 0  # every moving row has been in all sweeps so far
        for _ in range(min(hi - lo, self.method.max_sweeps or hi - lo) if len(now) else 0):
            swept, cost = swept + 1, cost + now.cost(start, hi)
            new, slope = now.evaluate(start, hi)
            update, still = compare(new, now.x[:, start:hi], now.z[:, start:hi], slope, unit)
            exact = still >= hi - start - 1
            done = exact | (update <= self.method.tol)
            lost = None
            if not math.isfinite(update.max()):
                over = moving & ~update.isfinite()
                head = new[:, 0].isfinite().all(1).cpu()
                strikes += over
                lost = over & (~head | exact | (strikes >= STRIKES))  # exact: all but the last, that is
                self.count(now.places[lost], swept, cost)
                self.lose(now, lost, over & ~head, start)
                new = torch.where(new.isfinite(), new, first_guess(now.z, self.method.init)[:, start:hi])
                done &= ~over
            self.write(now, moving if lost is None else moving & ~lost, whole, start, hi, new, _total(slope))
            if self.options.watch is not None:
                self.show(self.options.watch, now, now.places[moving], start, hi)
            if whole and lost is None and not bool(done.any()):  # all go on
                start += int(still.min())
                now.settle(start)
                start += 1
                continue
            done &= moving
            self.count(now.places[done], swept, cost)
            self.close(now.places[done], update[done].double(), exact[done])
            if whole and bool(done.all()):
                now.settle(start + int(still.min()))
                moving = ~done
                break
            left = moving & ~done if lost is None else moving & ~done & ~lost
            # The cache stays valid where none of its rows moved; the rows that go on start behind
            # what they themselves have settled.
            valid = start + int(still[moving].min())
            start += int(still[left].min()) if bool(left.any()) else 0
            now, keep = self.compact(now, left, valid, start)
            moving, whole = (left, False) if keep is None else (left[keep], True)
            if keep is not None:
                strikes, update = strikes[keep], update[keep]
            start += 1
            if not bool(moving.any()):
                break
        self.count(now.places[moving], swept, cost)
        self.limit_reached(now.places[moving], update[moving].double())
        self.put(now)
        if now is not rows and rows.x is not self.x:
            where = rows.places.to(self.x.device)
            rows.x, rows.slope = self.x[where], self.slope[where]
        return self.staying(rows)

    def compact(self, now: _Rows, left: Tensor, valid: int, ahead: int) -> tuple[_Rows, Tensor | None]:
        """Let the stopped rows go, if they are enough to pay for the copies; which stay, if some went."""
        count = int(left.sum())
        if count == 0 or count > self.options.compact_at * len(now):
            now.settle(valid)
            return now, None
        self.put(now)
        keep = left.nonzero()[:, 0]
        now.settle(ahead)
        fewer = now.take(keep)
        now.settle(valid)
        return fewer, keep

    def write(
        self, now: _Rows, moving: Tensor, whole: bool, lo: int, hi: int, new: Tensor, slope: Tensor
    ) -> None:
        """The sweep's results into the rows that are still moving."""
        if not whole or not bool(moving.all()):
            mask = moving.to(new.device)
            new = torch.where(mask[:, None, None], new, now.x[:, lo:hi])
            slope = torch.where(mask[:, None], slope, now.slope[:, lo:hi])
        now.x[:, lo:hi] = new
        now.slope[:, lo:hi] = slope

    def count(self, places: Tensor, swept: int, cost: int) -> None:
        """What the window has cost rows that leave it."""
        self.sweeps[places] += swept
        self.evaluated[places] += cost

    def close(self, places: Tensor, update: Tensor, exact: Tensor) -> None:
        """These rows have solved the window."""
        self.update[places] = torch.maximum(self.update[places], torch.where(exact, 0.0, update))
        self.code[places] = torch.maximum(self.code[places], torch.where(exact, EXACT, CONVERGED))

    def lose(self, now: _Rows, lost: Tensor, suspect: Tensor, start: int) -> None:
        """Rows that overflow leave; those whose exact prefix overflows have no finite answer.

        A later guess can poison an exact position (0 * inf is NaN), so a suspect is proved by
        evaluating its first unsolved position once more, from its exact prefix alone.
        """
        retry = lost.clone()
        if self.options.on_failure != "fallback":
            retry[:] = False
        elif bool(suspect.any()):
            keep = suspect.nonzero()[:, 0]
            now.settle(start - 1)
            x, _ = now.take(keep).evaluate(start, start + 1)
            retry[keep] = x.isfinite().flatten(1).all(1).cpu()
        self.put(now)
        self.again[now.places[retry]] = self.gone[now.places[retry]] = True
        self.give_up(now.places[lost & ~retry], start)

    def limit_reached(self, places: Tensor, update: Tensor) -> None:
        """These rows still move after all the sweeps that they were given."""
        if self.options.on_failure == "fallback":
            self.again[places] = self.gone[places] = True
        else:
            self.code[places] = SWEEP_LIMIT
            self.update[places] = torch.maximum(self.update[places], update)

    def give_up(self, places: Tensor, known: int | Tensor) -> None:
        """These rows have no finite answer; their first `known` positions are all there is."""
        self.code[places] = NONFINITE
        self.known[places] = known
        self.gone[places] = True

    def fall_back(self, places: Tensor) -> None:
        """Solve these rows again from the start, narrower."""
        if not len(places):
            return
        where = places.to(self.z.device)
        method = replace(self.method, width=narrower(self.width))
        options = replace(self.options, method=method, watch=None)
        run = _Run(self.block.select(where), self.z[where], options)
        run.solve()
        self.x[where], self.slope[where] = run.x, run.slope
        self.sweeps[places] += run.sweeps
        self.evaluated[places] += run.evaluated
        self.update[places] = run.update
        self.code[places] = torch.where(run.code == NONFINITE, NONFINITE, FELL_BACK)
        self.known[places] = run.known

    def staying(self, rows: _Rows) -> _Rows:
        """`rows` without those that are gone, whose answers are kept."""
        gone = self.gone[rows.places]
        if not bool(gone.any()):
            return rows
        self.put(rows)
        return rows.take((~gone).nonzero()[:, 0])

    def show(self, watch: Watcher, rows: _Rows, places: Tensor, lo: int, hi: int) -> None:
        """The batch as it stands after a sweep of `rows`, of which those in `places` were still moving."""
        self.put(rows)
        with torch.inference_mode(False):  # the copy is an ordinary tensor
            moving = torch.zeros(len(self.z), dtype=torch.bool)
            moving[places] = True
            name, number = self.options.name, self.shown
            watch(Sweep(block=name, number=number, lo=lo, hi=hi, moving=moving, x=self.x.clone()))
        self.shown += 1

    def put(self, rows: _Rows) -> None:
        """The rows' values into the answer."""
        if rows.x is not self.x:
            where = rows.places.to(self.x.device)
            self.x[where], self.slope[where] = rows.x, rows.slope


def _total(slope: Tensor) -> Tensor:
    """Over the numbers of a position."""
    return slope[..., 0] if slope.shape[-1] == 1 else slope.sum(-1)
