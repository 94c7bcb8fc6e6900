"""The loop: the inverse of a block by parallel sweeps over a window that slides along the sequence.

A sweep updates all positions t of a window at once: x_t <- f^-1(z_t; theta_t(x_{<t})). Each sample keeps its own
frontier, the number of its final positions. A window of one position is sequential decoding; without a width it is
the rest of the sequence, Algorithm 1 of Zhang et al. (2026).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import torch
from torch import Tensor

from jacobiflow.core.arguments import function, instance, switch, word
from jacobiflow.core.block import Block, Engine, take
from jacobiflow.core.failures import regrouped
from jacobiflow.core.method import Method, Plan
from jacobiflow.core.results import STATUSES, BlockStats, Decoded, DecodingError, OnFailure, Stats, Sweep, Watcher
from jacobiflow.core.rows import NONFINITE, Look, Rows, Verdict, first_guess
from jacobiflow.core.stopping import changes

ROUGH_TOL = 2**-5  # changes at which sweeps in bfloat16 end: its rounding is not far below
COMPACT_AT = 7 / 8  # solved rows leave the batch when this share of it or less is still moving


def decode(
    block: Block,
    z: Tensor,
    method: Method,
    *,
    on_failure: OnFailure = "fallback",
    cache: bool = True,
    compact_at: float = COMPACT_AT,
    number: int = 0,
    watch: Watcher | None = None,
) -> Decoded:
    """Invert z = block(x) as `method` says. z: [N, T, D] in the order of the data; it is never written to.

    on_failure: samples that have no finite answer or reach max_sweeps continue one position at a time ("fallback"),
        raise a DecodingError that names block `number` ("raise"), or are returned as they are ("return").
    cache: keep what the conditioner computed for final positions; False trades time for memory.
    compact_at: solved rows leave the batch when this share of it or less still moves; 0 keeps them.
    watch: called with the first guess and after every sweep of the whole batch, but not of samples that continue
        with a narrower window.
    """
    _check(block, z, method, on_failure, cache, watch)
    began = time.perf_counter()
    method = method.resolved(calibrated=block.guess is not None)
    if method.precision == "mixed" and (z.dtype != torch.float32 or block.engine.rough() is None):
        method = replace(method, precision="float32")
    observe = None if watch is None else Observer(watch, block, number, z)
    run = partial(solve, method=method, on_failure=on_failure, cache=cache, share=compact_at, observe=observe)
    with torch.inference_mode():
        rows = _in_parts(run, block, block.to_positions(z.detach()), block.engine.rows if watch is None else None)
    out = _decoded(block, rows, method, time.perf_counter() - began)
    if on_failure == "raise" and out.stats.status.failed:
        failed = [i for i, status in enumerate(out.stats.blocks[0].status) if status.failed]
        raise DecodingError(number, failed, out.stats.status)
    return out


def _check(block: Block, z: Tensor, method: Method, on_failure: OnFailure, cache: bool, watch: Watcher | None) -> None:
    for kind, value in ((Block, block), (Tensor, z), (Method, method)):
        instance(kind, value, "decode")
    word("on_failure", on_failure, get_args(OnFailure))
    switch("cache", cache)
    if watch is not None:
        function("watch", watch)
    if z.ndim != 3 or z.shape[1] != block.length:
        raise ValueError(f"z must be [N, {block.length}, D], not {list(z.shape)}")


def _in_parts(run: Callable[[Block, Tensor], Rows], block: Block, z: Tensor, most: int | None) -> Rows:
    """The rows of a batch, at most so many at a time."""
    if not most or len(z) <= most:
        return run(block, z)
    parts = torch.arange(len(z), device=z.device).tensor_split(-(-len(z) // most))
    return Rows.joined([replace(run(block.select(part), z[part]), place=part) for part in parts])


def _decoded(block: Block, rows: Rows, method: Method, seconds: float) -> Decoded:
    """The result, in the order of the data: copies outside inference mode, which autograd may use."""
    counts = torch.stack((rows.sweeps, rows.evaluated, rows.guess_sweeps)).cpu()
    stats = BlockStats(
        **dict(zip(("sweeps", "evaluated", "guess_sweeps"), counts, strict=True)),
        update=rows.change.clone().cpu(),
        status=tuple(map(STATUSES.__getitem__, rows.status.tolist())),
        seconds=seconds,
        backend=block.engine.name,
        precision=method.precision,
    )
    x, slopes = rows.answer[:, : rows.length], rows.log_slope[:, : rows.length]
    if STATUSES[NONFINITE] in stats.status:  # no guess is returned as an answer
        beyond = torch.arange(rows.length, device=x.device) >= rows.frontier[:, None]
        unknown = (rows.status == NONFINITE)[:, None] & beyond
        x, slopes = x.masked_fill(unknown[..., None], float("nan")), slopes.masked_fill(unknown, float("nan"))
    x = x.clone() if block.order is None else block.from_positions(x)
    return Decoded(x=x, log_det=slopes.sum(1), stats=Stats(blocks=(stats,), seconds=seconds, plan=Plan((method,))))


class Observer:
    """Shows a batch to `watch`, in the order of the data, after a sweep over lo .. hi - 1 of the rows in `moved`."""

    def __init__(self, watch: Watcher, block: Block, number: int, z: Tensor) -> None:
        self.watch, self.block, self.number, self.count = watch, block, number, 0
        self.answer = torch.zeros_like(z)

    def __call__(self, rows: Rows, moved: Tensor, lo: int, hi: int) -> None:
        self.answer[rows.place] = rows.answer[:, : rows.length]
        with torch.inference_mode(False):  # the copies are ordinary tensors
            moving = torch.isin(torch.arange(len(self.answer)), rows.place[moved].cpu())
            x = self.block.from_positions(self.answer.clone())
            self.watch(Sweep(block=self.number, number=self.count, lo=lo, hi=hi, moving=moving, x=x))
        self.count += 1


def solve(
    block: Block, z: Tensor, method: Method, on_failure: OnFailure, cache: bool, share: float, observe: Observer | None
) -> Rows:
    """The answers of one batch, z [n, T, D] in the order of positions."""
    init = method.init or ("zeros" if observe is None else None)  # of sequential decoding, which reads no guess
    guess, width = first_guess(z, init, block.guess), min(method.width or block.length, block.length)
    done, rows = Rows.start(block, z, guess, width, block.engine.new_cache(len(z)) if cache else None).parted()
    if width > 1 or observe is not None:
        rows.block.engine.solve(rows.x, rows.z, rows.log_slope[:, : rows.length], 0, 1, rows.cache)
        rows.finish(0, 1)
        if method.precision == "mixed" and (fast := rows.block.engine.rough()) is not None:
            rows.guess, rows.guess_sweeps = rough_guess(fast, rows.z, rows.x[:, :1], rows.guess, method)
            rows.seen, rows.answer = rows.guess.clone(), rows.guess.clone()
        if observe is not None:
            observe(rows, rows.moving, 0, 1)
        lost, rows = rows.parted()
        done += lost
    queue = [rows]
    while queue:
        rows = queue.pop()
        if rows.width == 1:
            solved, narrower = one_by_one(rows, observe)
        else:
            solved, narrower = slide(rows, method, on_failure, share, observe)
        for part in solved:
            part.cache = None  # it is large
        done += solved
        queue += narrower
        observe = None  # samples that continue with a narrower window are not shown
    return Rows.joined(done)


def rough_guess(engine: Engine, z: Tensor, first: Tensor, guess: Tensor, method: Method) -> tuple[Tensor, Tensor]:
    """A better first guess by sweeps in bfloat16, and how many each row took; a row that overflows keeps its last."""
    x, count = guess.clone(), torch.zeros(len(z), dtype=torch.long, device=z.device)
    x[:, :1] = first.nan_to_num(0, 0, 0)
    rows, length = torch.arange(len(z), device=z.device), z.shape[1]
    for _ in range(min(method.max_sweeps or length, length - 1)):
        if not len(rows):
            break
        part, own, known = engine.select(rows), x[rows], z[rows, 1:]
        new, log_slope = part.inverse(known, part.params(own, 1, length - 1, None))
        largest = changes(new, own[:, 1:], known, log_slope, method)[0].amax(1)
        x[rows, 1:] = torch.where(largest.isfinite()[:, None, None], new, own[:, 1:])
        count[rows] += 1
        rows = rows[largest > max(ROUGH_TOL, method.tol)]  # NaN is not larger
    return x, count


def slide(
    rows: Rows, method: Method, on_failure: OnFailure, share: float, observe: Observer | None
) -> tuple[list[Rows], list[Rows]]:
    """Sweep until every row is solved. Returns solved rows, and those that continue with narrower windows."""
    done, narrower, look = list[Rows](), list[Rows](), rows.look()
    while look.count:
        moving, low = rows.moving if observe else None, look.low
        verdict = sweep(rows, look, method)
        look = verdict.look
        if observe is not None and moving is not None:
            observe(rows, moving, low, rows.length)
        if look.overflowed or method.max_sweeps is not None:
            rows, *left = regrouped(rows, verdict, method, on_failure)
            narrower += left
            look = rows.look()
        if rows.block.engine.compacts and 0 < look.count <= min(share * len(rows), len(rows) - 1):
            solved, rows = rows.parted()
            done += solved
    return [*done, rows], narrower


def sweep(rows: Rows, look: Look, method: Method) -> Verdict:
    """x_t <- f^-1(z_t; theta_t(x_{<t})) for all positions t of each row's window; what became of the rows."""
    engine, window = rows.block.engine, rows.window(look)
    theta = engine.params(rows.x, window.start, window.width, rows.cache)
    new, log_slope = engine.inverse(take(rows.z, window.start, window.width), theta)
    return engine.accept(rows, window, new, log_slope, method)


def one_by_one(rows: Rows, observe: Observer | None) -> tuple[list[Rows], list[Rows]]:
    """Sequential decoding from each row's frontier on; rows of one frontier are solved together."""
    length, frontiers = rows.length, set(rows.frontier.tolist())
    if len(frontiers) > 1:
        return [], [rows.take(rows.frontier == frontier) for frontier in frontiers]
    low, slopes = min(frontiers, default=length), rows.log_slope[:, :length]
    step = length if observe is None else 1
    for start in range(low, length, step):
        rows.block.engine.solve(rows.x, rows.z, slopes, start, min(start + step, length), rows.cache)
        if observe is not None:
            rows.answer[:, start] = rows.x[:, start]
            observe(rows, rows.moving, start, start + 1)
    rows.finish(low, length)
    return [rows], []
