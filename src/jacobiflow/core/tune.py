"""Measures blocks on this machine and picks the fastest Plan whose answers stay close to exact.

Each block is measured by itself on the exact answer of the blocks before it: how long a method takes
for a batch, and how far its answer is from exact. The plan takes from every block the fastest method
within a common threshold, the loosest at which the deviation of the whole stack, measured end to end,
stays within the bound. Fresh noise then has the last word, on deviation and on time: what was put
together from blocks races the next bolder choice, sequential decoding and plans that have a name.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.block import Block
from jacobiflow.core.decode import decode
from jacobiflow.core.plan import Plan
from jacobiflow.core.types import Init, Method, Unit

WIDTHS = (None, 64, 32, 16, 8)
FIRST_GUESSES: tuple[Init, ...] = ("previous", "zeros")
TOLS = (10.0, 3.0, 1.0, 0.3, 0.1)  # in bounds
MARGIN = 0.8  # of the bound: noise to come may be worse than the noise measured
LOOSEST = 4.0  # a block's deviation, in bounds, that the blocks after it might still dampen
FINEST = 0.05  # a block's deviation, in bounds, below which a tighter method is of no use
TIGHTER = 0.7  # share of a faster method's deviation that makes a slower one worth having
WORTH = 0.95  # share of sequential decoding's time within which sweeps replace it
SLIGHT = 0.02  # share of a plan's time that is not worth another try
BRIEF = 0.03  # seconds: a shorter first run is done again, without what it paid for set-up
SPENT = 0.3  # seconds of sequential decoding, a block, after which three runs are enough
FEWEST, MOST = 3, 11  # runs that a median is taken of
LAPS = 5, 21  # the same, of the final race
CLOSE = 1.15  # of the best time known: a rival that is slower at a first look does not race
GUIDE = 16  # rows, at least, on which the deviations of single blocks are compared; whole plans get all

Stack = Sequence[Block]  # in sampling order
Clock = Callable[[], float]


@dataclass(eq=False)
class Trial:
    """One method on one block: seconds of each batch, and the deviation of the first `rows` samples."""

    method: Method
    times: list[float] = field(default_factory=list)
    deviation: float = 0.0
    rows: int = 0

    @property
    def seconds(self) -> float:
        """The median of a batch."""
        return statistics.median(self.times)

    def about(self) -> dict[str, Any]:
        """As plain data."""
        off = self.deviation if math.isfinite(self.deviation) else None
        return asdict(self.method) | {"seconds": self.seconds, "deviation": off, "rows": self.rows}


def tune(
    stack: Stack,
    z: Tensor,
    *,
    batch: int,
    max_deviation: float,
    unit: Unit | None = None,
    rivals: Sequence[Sequence[Plan]] = (),
    clock: Clock = time.perf_counter,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The fastest plan for batches of this size with |x - exact| <= max_deviation, as measured on z.

    stack: the blocks, bound to the rows of z. z: [2 R, T, D], R a multiple of `batch`: the plan is
    chosen on the first half and verified on the second. Sequential decoding stays wherever sweeps
    do not beat it. The samples measured keep the bound with a margin; that is no guarantee for
    others. `about` of the plan has the figures. unit: of all methods, see `Method`. rivals: plans to
    beat, in ladders with the loosest first; of each ladder the first that keeps the bound takes part in
    the final race. clock: seconds; on a device that works on its own it must wait for the device.
    """
    rows = len(z) // 2
    assert len(z) == 2 * rows > 0 == rows % batch, "z must have two halves of whole batches"
    first, fresh = (_Half(stack, z, begin, rows, batch, unit, clock) for begin in (0, rows))
    progress("exact answers")
    blocks = first.blocks(max_deviation)
    fronts = []
    for i, block in enumerate(blocks):
        progress(f"block {i + 1} of {len(blocks)}")
        fronts.append(block.front())
    progress("the whole plan")
    bound, exact = MARGIN * max_deviation, first.exact
    within = _within(first, fronts, bound)
    progress("fresh noise")
    halves = fresh, first
    while not all(half.keeps(within[-1], bound) for half in halves):
        within.pop()
    progress("the final race")
    second = [plan for plan in within[-2:-1] if all(half.keeps(plan, bound) for half in halves)]
    racers = [exact, *second, within[-1], *_rivals(rivals, halves, bound, within[-1])]
    racers = list(dict.fromkeys(racers))
    times = fresh.race(racers)
    shares = {p: _share(times[p], times[exact]) for p in racers}
    plan = min(racers, key=lambda p: shares[p] * (WORTH if p == exact else 1))
    for block, front, method in zip(blocks, fronts, plan, strict=True):
        if all(trial.method != method for trial in front):  # a rival's
            front.append(block.first_look(Trial(method)))
    base = sum(_trial(*pair).seconds for pair in zip(fronts, exact, strict=True))
    predicted = sum(_trial(*pair).seconds for pair in zip(fronts, plan, strict=True))
    measured = {
        "seconds": statistics.median(times[plan]),
        "sequential_seconds": statistics.median(times[exact]),
        "speedup": 1 / shares[plan],
        "predicted_speedup": base / predicted,
        "deviation": max(half.known[plan] for half in (first, fresh)),
        "rows": len(z),
    }
    tried = [[t.about() for t in sorted(b.trials, key=lambda t: t.seconds)] for b in blocks]
    return Plan(plan.methods, about={"measured": measured, "tried": tried})


def tolerances(bound: float) -> list[float]:
    """The tolerances that are tried for this bound on the deviation, the loosest first.

    >>> tolerances(0.05)
    [0.5, 0.15, 0.05, 0.015, 0.005]
    """
    return [float(f"{tol * bound:.3g}") for tol in TOLS]


def deviation(x: Tensor, exact: Tensor) -> float:
    """The largest |x - exact| over the samples that have a finite exact answer."""
    off = (x - exact).abs()[exact.isfinite().flatten(1).all(1)]
    return float(off.nan_to_num(nan=math.inf).max()) if off.numel() else 0.0


def _within(half: _Half, fronts: list[list[Trial]], bound: float) -> list[Plan]:
    """Plans within the bound, from sequential decoding to the fastest one found."""
    levels = sorted({trial.deviation for front in fronts for trial in front})
    plans = list(dict.fromkeys([half.exact, *(_at(fronts, level) for level in levels)]))
    low, high = 0, len(plans)  # plans[low] is within the bound, plans[high] is not
    while high - low > 1:
        middle = (low + high) // 2
        if half.keeps(plans[middle], bound):
            low = middle
        else:
            high = middle
    plan = plans[low]
    for _, i, method in sorted(_bolder(fronts, plan), key=lambda step: step[0]):
        bolder = Plan((*plan.methods[:i], method, *plan.methods[i + 1 :]))
        if half.keeps(bolder, bound):
            plan = bolder
    return list(dict.fromkeys([*plans[: low + 1], plan]))


def _rivals(
    ladders: Sequence[Sequence[Plan]], halves: Sequence[_Half], bound: float, best: Plan
) -> list[Plan]:
    """Of each ladder the loosest plan within the bound, if that is not slow."""
    half, found = halves[0], []
    limit = CLOSE * min(half.first_look(half.exact), half.first_look(best))
    for ladder in ladders:
        for plan in ladder:
            if half.first_look(plan) > limit:
                break  # tighter ones are slower
            if all(h.keeps(plan, bound) for h in halves):
                found.append(plan)
                break
    return found


def _at(fronts: list[list[Trial]], level: float) -> Plan:
    """From each block the fastest method whose deviation is at most `level`."""
    return Plan(tuple(next(t.method for t in front if t.deviation <= level) for front in fronts))


def _bolder(fronts: list[list[Trial]], plan: Plan) -> Iterator[tuple[float, int, Method]]:
    """Each block's next faster method, with the seconds it adds: one may go further than all can."""
    total = sum(_trial(*pair).seconds for pair in zip(fronts, plan, strict=True))
    for i, (front, method) in enumerate(zip(fronts, plan, strict=True)):
        now = _trial(front, method)
        for faster in front[: front.index(now)][-1:]:
            if now.seconds - faster.seconds > SLIGHT * total:
                yield faster.seconds - now.seconds, i, faster.method


def _share(times: list[float], base: list[float]) -> float:
    """The median of the times, each in units of the other's time in the same turn."""
    return statistics.median(t / b for t, b in zip(times, base, strict=True))


def _trial(front: list[Trial], method: Method) -> Trial:
    return next(trial for trial in front if trial.method == method)


def _turns(
    times: list[float], rows: int, batch: int, enough: float, counts: tuple[int, int] = (FEWEST, MOST)
) -> Iterator[slice]:
    """Batches to time, each time another one, until `times` are many or long enough."""
    fewest, most = counts
    while len(times) < fewest or (len(times) < most and sum(times) < enough):
        begin = len(times) * batch % rows
        yield slice(begin, begin + batch)


class _Half:
    """Half of the noise, and whole plans run on it."""

    def __init__(
        self, stack: Stack, z: Tensor, begin: int, rows: int, batch: int, unit: Unit | None, clock: Clock
    ) -> None:
        self.z, self.batch, self.unit, self.clock = z[begin : begin + rows], batch, unit, clock
        self.stack = _part(stack, begin, begin + rows, z)
        self.exact = Plan.sequential(len(stack)).in_unit(unit)
        self.answer: Tensor | None = None  # the exact one
        self.known: dict[Plan, float] = {self.exact: 0.0}

    def blocks(self, bound: float) -> list[_Measured]:
        """Each block with its exact input."""
        found: list[_Measured] = []

        def measured(block: Block, z: Tensor, x: Tensor) -> None:
            found.append(_Measured(block, z, x, self.batch, bound, self.unit, self.clock))

        self.answer = _solve(self.stack, self.z, self.exact, measured)
        return found

    def keeps(self, plan: Plan, bound: float) -> bool:
        """Whether the deviation of a plan is within the bound; a few rows may tell that it is not."""
        if plan not in self.known:
            if self.answer is None:
                self.answer = _solve(self.stack, self.z, self.exact)
            self.known[plan] = 0.0
            for rows in (slice(0, GUIDE), slice(GUIDE, len(self.z))):
                if self.known[plan] <= bound and rows.start < len(self.z):
                    stack = _part(self.stack, rows.start, min(rows.stop, len(self.z)), self.z)
                    off = deviation(_solve(stack, self.z[rows], plan), self.answer[rows])
                    self.known[plan] = max(self.known[plan], off)
        return self.known[plan] <= bound

    def first_look(self, plan: Plan) -> float:
        """The better of two runs of the first batch."""
        return min(self.seconds(plan, slice(0, self.batch)) for _ in range(2))

    def seconds(self, plan: Plan, rows: slice) -> float:
        """Of these rows."""
        stack = _part(self.stack, rows.start, rows.stop, self.z)
        began = self.clock()
        _solve(stack, self.z[rows], plan)
        return self.clock() - began

    def race(self, plans: Sequence[Plan]) -> dict[Plan, list[float]]:
        """Seconds of several batches, the plans in turn: of one turn, they can be compared on a machine that
        is busier now and then."""
        times: dict[Plan, list[float]] = {plan: [] for plan in plans}
        for rows in _turns(times[self.exact], len(self.z), self.batch, SPENT * len(self.stack), LAPS):
            for plan, found in times.items():
                found.append(self.seconds(plan, rows))
        return times


class _Measured:
    """One block on exact inputs [rows, T, D], and what was tried on it."""

    def __init__(
        self,
        block: Block,
        z: Tensor,
        exact: Tensor,
        batch: int,
        bound: float,
        unit: Unit | None,
        clock: Clock,
    ) -> None:
        self.block, self.z, self.exact = block, z, exact
        self.batch, self.bound, self.unit, self.clock = batch, bound, unit, clock
        self.trials: list[Trial] = []

    def front(self) -> list[Trial]:
        """Methods worth having, the fastest first, each more exact than those before; the last is exact.

        Methods are looked at from the fastest up. The tolerances of a width and first guess wait in a
        ladder, loosest first: a tighter one is slower, so it is timed only when its turn has come.
        """
        exact = Method(width=1, unit=self.unit)
        base = self.first_look(Trial(exact, rows=len(self.z)))
        self.run(base, slice(0, self.batch))
        limit = min(base.times)
        waiting = dict(self.ladders(limit))
        front: list[Trial] = []
        best = LOOSEST * self.bound
        while waiting and best > FINEST * self.bound:
            trial = min(waiting, key=lambda t: t.seconds)
            ladder = waiting.pop(trial)
            if trial.deviation < best:  # on the rows that were timed
                self.look_further(trial)
            if trial.deviation < best:
                best = TIGHTER * trial.deviation
                front.append(trial)
            waiting |= self.next_step(ladder, limit)
        if front:
            for rows in _turns(base.times, len(self.z), self.batch, SPENT):
                for trial in (base, *front):
                    self.run(trial, rows)
        front = sorted((t for t in front if t.seconds < WORTH * base.seconds), key=lambda t: t.seconds)
        better = [t for i, t in enumerate(front) if all(t.deviation < u.deviation for u in front[:i])]
        return [*better, base]

    def ladders(self, limit: float) -> Iterator[tuple[Trial, Iterator[Method]]]:
        """The loosest method of each width and first guess, with the tighter ones, where it is in time."""
        for width in WIDTHS:
            if width is not None and width >= self.block.length:
                continue
            for init in FIRST_GUESSES:
                methods = (
                    Method(width=width, tol=tol, init=init, unit=self.unit) for tol in tolerances(self.bound)
                )
                ladder = iter(list(methods))
                step = self.next_step(ladder, limit)
                yield from step.items()
                if not step:  # another first guess hardly saves a width that is too slow
                    break

    def next_step(self, ladder: Iterator[Method], limit: float) -> dict[Trial, Iterator[Method]]:
        """The next method of a ladder, if there is one and it is in time."""
        for method in ladder:
            trial = self.first_look(Trial(method))
            return {trial: ladder} if trial.seconds <= limit else {}
        return {}

    def first_look(self, trial: Trial) -> Trial:
        """One batch, timed."""
        self.trials.append(trial)
        self.run(trial, slice(0, self.batch))
        if trial.seconds < BRIEF:
            trial.times.clear()
            self.run(trial, slice(0, self.batch))
        return trial

    def look_further(self, trial: Trial) -> None:
        """The deviation of more rows, if a batch has but few."""
        rest = slice(trial.rows, min(GUIDE, len(self.z)))
        if rest.start < rest.stop:
            self.see(trial, rest, self.solve(trial.method, rest))

    def run(self, trial: Trial, rows: slice) -> None:
        """Time one batch."""
        began = self.clock()
        x = self.solve(trial.method, rows)
        trial.times.append(self.clock() - began)
        if rows.start == trial.rows:
            self.see(trial, rows, x)

    def solve(self, method: Method, rows: slice) -> Tensor:
        """These rows by this method."""
        (block,) = _part([self.block], rows.start, rows.stop, self.z)
        return decode(block, self.z[rows], method).x

    def see(self, trial: Trial, rows: slice, x: Tensor) -> None:
        """The deviation of the next rows."""
        trial.deviation = max(trial.deviation, deviation(x, self.exact[rows]))
        trial.rows = rows.stop


def _part(stack: Stack, begin: int, end: int, like: Tensor) -> Stack:
    """The blocks bound to some of the rows."""
    rows = torch.arange(begin, end, device=like.device)
    return [block.select(rows) for block in stack]


def _solve(
    stack: Stack, seq: Tensor, plan: Plan, seen: Callable[[Block, Tensor, Tensor], None] = lambda *_: None
) -> Tensor:
    """Through all blocks by the plan; `seen` gets each block with its input and answer."""
    for method, block in zip(plan, stack, strict=True):
        x = decode(block, seq, method).x
        seen(block, seq, x)
        seq = x
    return seq
