"""The cost model of this machine: seconds of one sweep, by width and number of rows.

A few sweeps of a block are timed once, in under a second. Times are kept in the cache folder for every block
of the same shape. With the sweeps that a convergence profile counts they predict how long a method takes.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.block import Block
from jacobiflow.core.cache_folder import own_folder, read_own, write_own
from jacobiflow.core.decode import sweep
from jacobiflow.core.hardware import processor_name
from jacobiflow.core.method import Method
from jacobiflow.core.records import build, parse_json
from jacobiflow.core.rows import Look, Rows
from jacobiflow.kernels.build import version as kernels_version

WIDTHS = (8, 16, 32, 64)
BUDGET_SECONDS = 0.6  # per number of rows; what does not fit is extrapolated
REPEATS = 3
STEPS = 8  # positions that sequential decoding is timed on, at least
ENOUGH_SECONDS = 0.004  # positions are added until a run takes as long: a call has a cost of its own

Clock = Callable[[], float]
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

    def sequential(self, n: int) -> float:
        """Seconds of sequential decoding of n samples."""
        return self.position * (self.length - 1) * n / self.rows

    def swept(self, width: int | None, sweeps: Sequence[int], n: int, guess: Sequence[int] = ()) -> float:
        """Seconds for n samples, whose sweeps, and sweeps in bfloat16 before them, are distributed as these.

        Samples that are done leave the batch, so a sweep costs as much as the samples that still move.
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
        *(torch.__version__, kernels_version(), processor_name(z.device), torch.get_num_threads()),
        *(block.engine.name, type(block.conditioner).__name__, str(z.dtype), rows, list(z.shape[1:]), shapes),
    ]
    key = hashlib.sha256(json.dumps(setting).encode()).hexdigest()[:32]
    with _lock:
        if key not in _known:
            _known[key] = _kept(key, partial(measure, block, z[:rows], clock))
        return _known[key]


def _kept(key: str, make: Callable[[], Costs]) -> Costs:
    """Costs from the cache folder; new ones are kept there."""
    folder = own_folder("costs")
    with suppress(OSError, ValueError):
        if folder is not None:
            return build(Costs, parse_json(read_own(folder / f"{key}.json").decode()), "costs")
    costs = make()
    with suppress(OSError):  # measured again next time
        if folder is not None:
            write_own(folder / f"{key}.json", json.dumps(asdict(costs)).encode())
    return costs


@torch.inference_mode()
def measure(block: Block, z: Tensor, clock: Clock = time.perf_counter) -> Costs:
    """Time sequential decoding and single sweeps in the middle of the sequence, with n rows and with one.

    z [n, T, D] is finite, and serves as x too.
    """
    n, length, _ = z.shape
    widths = (*(w for w in WIDTHS if w < length), length)
    if length == 1:
        return Costs(rows=n, length=1, position=0.0, widths=widths, alone=(0.0,), together=(0.0,))
    every, one = (block.select(torch.arange(rows, device=z.device)) for rows in (n, 1))
    position = _position_seconds(every, z, clock)  # and again below: other programs come and go
    together = _sweep_seconds(every, z, widths, clock)
    alone = together if n == 1 else _sweep_seconds(one, z[:1], widths, clock)
    fast, rough = one.engine.rough(), 0.0
    if fast is not None:
        rough = _best(lambda: fast.inverse(z[:1, 1:], fast.params(z[:1], 1, length - 1, None)), clock)
    rough = rough * together[-1] / (alone[-1] or 1.0)
    position = min(position, _position_seconds(every, z, clock))
    return Costs(rows=n, length=length, position=position, widths=widths, alone=alone, together=together, rough=rough)


def _position_seconds(block: Block, z: Tensor, clock: Clock) -> float:
    """One position of sequential decoding."""
    n, length, _ = z.shape
    slope, steps = z.new_zeros(n, length), min(STEPS, length - 1)
    while True:
        start = (length - steps + 1) // 2  # in the middle of the sequence
        cache = _filled(block, z, start)
        seconds = _best(partial(block.engine.solve, z.clone(), z, slope, start, start + steps, cache), clock)
        if seconds >= ENOUGH_SECONDS or steps == length - 1:
            return seconds / steps
        steps = min(4 * steps, length - 1)


def _sweep_seconds(block: Block, z: Tensor, widths: Sequence[int], clock: Clock) -> tuple[float, ...]:
    """One sweep by width; the widest are extrapolated when time runs out."""
    (n, length, dim), began, found = z.shape, clock(), list[float]()
    for i, width in enumerate(widths):
        if found and clock() - began > BUDGET_SECONDS:
            found.append(found[-1] * width / widths[i - 1])
            continue
        start = 1 if width == length else max(length // 2, 1)
        rows = Rows.start(block, z, z[:, :1], z.new_zeros(n, 1, dim), z, width)
        rows.frontier.fill_(start)
        rows.cache = _filled(block, z, start)
        found.append(_best(partial(_sweep_from, start, rows, rows.look()), clock))
    return tuple(found)


def _sweep_from(start: int, rows: Rows, look: Look) -> None:
    rows.frontier.fill_(start)
    sweep(rows, look, Method(width=rows.width, unit="absolute"))


def _filled(block: Block, x: Tensor, start: int) -> Any:
    """A cache that holds the inputs before a window from `start` on."""
    cache = block.engine.new_cache(len(x))
    if start > 1:
        block.engine.params(x, 1, start - 1, cache)
    return cache


def _best(work: Callable[[], object], clock: Clock) -> float:
    """Seconds of the shortest of a few runs, after one that pays for set-up."""
    work()
    times = []
    for _ in range(REPEATS):
        began = clock()
        work()
        times.append(clock() - began)
    return min(times)
