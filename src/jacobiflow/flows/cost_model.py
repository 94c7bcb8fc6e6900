"""The cost model of this machine: seconds of one sweep, by width and number of rows.

A few sweeps of a block are timed in about a second. The cache folder keeps them for blocks of the same shape. If
other programs kept the processors busy, the next process times them again.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from timeit import timeit
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.block import Block
from jacobiflow.core.decode import sweep
from jacobiflow.core.files import own_folder, read_own, write_own
from jacobiflow.core.hardware import busy_elsewhere, processor_name
from jacobiflow.core.method import Method
from jacobiflow.core.records import build, parse_json
from jacobiflow.core.rows import Look, Rows
from jacobiflow.kernels.build import version as kernels_version
from jacobiflow.kernels.threads import thread_count

WIDTHS = (8, 16, 32, 64)
VERSION = 2  # of how costs are measured
BUDGET_SECONDS = 0.3  # of first runs per number of rows; what does not fit is extrapolated
REPEATS = 3  # of each run, at least
SPREAD_SECONDS = 0.2  # over which runs are repeated at least: other programs come and go
CROWDED_CORES = 0.2  # that other programs may keep busy beyond those that are left to them
AGAIN = 4  # measurements that may follow a crowded one
STEPS = 8  # positions that sequential decoding is timed on, at least
ENOUGH_SECONDS = 0.004  # positions are added until a run takes as long: a call has a cost of its own

Clock = Callable[[], float]
Work = Callable[[], object]
_lock = threading.Lock()  # two at once would time each other
_known: dict[str, Costs] = {}


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds for a batch of `rows` samples on blocks of one shape."""

    rows: int
    length: int
    position: float  # one position of sequential decoding
    widths: tuple[int, ...]  # ascending; the last is the whole sequence
    alone: tuple[float, ...]  # one sweep of one row, by width
    together: tuple[float, ...]  # one sweep of all rows, by width
    rough: float = 0.0  # one whole sweep of all rows in bfloat16; 0: there is none
    again: int = 0  # how often these may still be measured again: other programs took processors away

    def sequential(self, n: int) -> float:
        return self.position * (self.length - 1) * n / self.rows

    def swept(self, width: int | None, sweeps: Sequence[int], n: int, guess: Sequence[int] = ()) -> float:
        """Seconds for n samples whose sweeps, and sweeps in bfloat16 before them, are distributed as these.

        A sweep costs as much as the samples that still move: those that are done leave the batch.
        """
        i = len(self.widths) - 1 if width is None else self.widths.index(min(width, self.widths[-1]))
        one, every = self.alone[i], self.together[i]
        per_row = (every - one) / max(self.rows - 1, 1)
        total = self.rough * sum(guess) / max(len(guess), 1)
        for count in range(max(sweeps, default=0)):
            share = sum(s > count for s in sweeps) / len(sweeps)  # of samples that need another sweep
            likely = 1 - (1 - share) ** self.rows  # that any sample of the batch does
            total += likely * one + per_row * max(self.rows * share - likely, 0.0)
        return total * n / self.rows


def costs_of(block: Block, z: Tensor, *, clock: Clock = time.perf_counter) -> Costs:
    """The costs of a block bound to the rows of z [n, T, D]; measured if they are not known yet."""
    rows = min(len(z), block.engine.rows or len(z))
    shapes = [list(t.shape) for t in block.conditioner.tensors() if len(t) != len(z)]
    setting = [
        *(VERSION, torch.__version__, kernels_version(), processor_name(z.device), thread_count()),
        *(block.engine.name, type(block.conditioner).__name__, str(z.dtype), rows, list(z.shape[1:]), shapes),
    ]
    key = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:32]
    with _lock:
        if key not in _known:
            _known[key] = _kept(key, partial(measure, block, z[:rows], clock))
        return _known[key]


def _kept(key: str, make: Callable[[], Costs]) -> Costs:
    """Costs from the cache folder; new ones are kept there."""
    folder, known = own_folder("costs"), None
    with suppress(OSError, ValueError):
        if folder is not None:
            known = build(Costs, parse_json(read_own(folder / f"{key}.json").decode()), "costs")
    if known is not None and known.again <= 0:
        return known
    costs = make()
    if known is not None:  # the quicker ones: other programs only add to them
        costs = replace(min(known, costs, key=lambda c: c.position), again=min(known.again - 1, costs.again))
    with suppress(OSError):  # measured again next time
        if folder is not None:
            write_own(folder / f"{key}.json", json.dumps(asdict(costs)).encode())
    return costs


@torch.inference_mode()
def measure(block: Block, z: Tensor, clock: Clock = time.perf_counter) -> Costs:
    """Time sequential decoding and single sweeps of finite z [n, T, D], with n rows and with one."""
    n, length, _ = z.shape
    widths = (*(w for w in WIDTHS if w < length), length)
    if length == 1:
        return Costs(rows=n, length=1, position=0.0, widths=widths, alone=(0.0,), together=(0.0,))
    every, one = (block.select(torch.arange(rows, device=z.device)) for rows in (n, 1))
    began, others = time.perf_counter(), busy_elsewhere()
    positions, steps = _positions(every, z, clock)
    parts, fast = [_sweeps(every, z, widths, clock), _sweeps(one, z[:1], widths, clock)], one.engine.rough()
    works = [positions, *parts[0], *parts[1]]
    if fast is not None:
        works.append(lambda: fast.inverse(z[:1, 1:], fast.params(z[:1], 1, length - 1, None)))
        works[-1]()
    seconds = iter(_shortest(works, clock))
    position = next(seconds) / steps
    together, alone = (_every_width([next(seconds) for _ in part], widths) for part in parts)
    rough = next(seconds, 0.0) * together[-1] / (alone[-1] or 1.0)
    busy = (busy_elsewhere() - others) / (time.perf_counter() - began)
    crowded = busy + thread_count() > (os.cpu_count() or 1) + CROWDED_CORES
    found = {"position": position, "alone": alone, "together": together, "rough": rough}
    return Costs(rows=n, length=length, widths=widths, again=AGAIN if crowded else 0, **found)  # type: ignore[arg-type]


def _shortest(works: Sequence[Work], clock: Clock) -> list[float]:
    """The shortest time of each. They run in turn, so a short disturbance spoils none."""
    seconds, began, turns = [math.inf] * len(works), clock(), 0
    while turns < REPEATS or clock() - began < SPREAD_SECONDS:
        seconds = [min(known, timeit(work, timer=clock, number=1)) for known, work in zip(seconds, works, strict=True)]
        turns += 1
    return seconds


def _positions(block: Block, z: Tensor, clock: Clock) -> tuple[Work, int]:
    """Sequential decoding of some positions in the middle of the sequence, and how many they are."""
    n, length, _ = z.shape
    slope, steps = z.new_zeros(n, length), min(STEPS, length - 1)
    while True:
        start = (length - steps + 1) // 2
        work = partial(block.engine.solve, z.clone(), z, slope, start, start + steps, _filled(block, z, start))
        work()
        if steps == length - 1 or timeit(work, timer=clock, number=1) >= ENOUGH_SECONDS:
            return work, steps
        steps = min(4 * steps, length - 1)


def _sweeps(block: Block, z: Tensor, widths: Sequence[int], clock: Clock) -> list[Work]:
    """One sweep by width, of as many widths as the time allows."""
    length, began, works = z.shape[1], clock(), list[Work]()
    for width in widths:
        if works and clock() - began > BUDGET_SECONDS:
            break
        start = 1 if width == length else max(length // 2, 1)
        rows = Rows.start(block, z, z, width, _filled(block, z, start))
        rows.frontier.fill_(start)
        works.append(partial(_sweep_from, start, rows, rows.look()))
        works[-1]()
    return works


def _every_width(seconds: Sequence[float], widths: Sequence[int]) -> tuple[float, ...]:
    """Seconds by width, extrapolated to those that were not measured."""
    known = len(seconds)
    return (*seconds, *(seconds[-1] * width / widths[known - 1] for width in widths[known:]))


def _sweep_from(start: int, rows: Rows, look: Look) -> None:
    rows.frontier.fill_(start)
    sweep(rows, look, Method(width=rows.width, unit="absolute"))


def _filled(block: Block, x: Tensor, start: int) -> Any:
    """A cache that holds the inputs before a window from `start` on."""
    cache = block.engine.new_cache(len(x))
    if start > 1:
        block.engine.params(x, 1, start - 1, cache)
    return cache
