"""The loop: the inverse of a block by parallel sweeps over a window that slides along the sequence.

A sweep updates all positions t of a window at once from the current guess:
    x_t <- f^-1(z_t; theta_t(x_{<t}))
Each sample keeps its own frontier, the number of its final positions. A window of one position is sequential
decoding; without a width it is the rest of the sequence, Algorithm 1 of Zhang et al. (2026).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jacobiflow.core.block import Block, Cache, Engine
from jacobiflow.core.failures import next_widths
from jacobiflow.core.method import Method, Plan
from jacobiflow.core.results import (
    ON_FAILURE,
    STATUSES,
    BlockStats,
    Decoded,
    DecodingError,
    OnFailure,
    Stats,
    Sweep,
    Watcher,
)
from jacobiflow.core.rows import Look, Rows, Verdict, first_guess
from jacobiflow.core.stopping import changes

ROUGH_TOL = 2**-5  # changes at which sweeps in bfloat16 end: its rounding is not far below
COMPACT_AT = 7 / 8  # solved rows leave the batch when this share of it or less is still moving


@dataclass(frozen=True)
class Options:
    """How to solve; see `decode`."""

    method: Method
    on_failure: OnFailure = "fallback"
    cache: bool = True
    compact_at: float = COMPACT_AT
    number: int = 0
    watch: Watcher | None = None

    def __post_init__(self) -> None:
        if self.on_failure not in ON_FAILURE:
            raise ValueError(f"on_failure must be one of {', '.join(ON_FAILURE)}, not {self.on_failure!r}")


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

    on_failure: what happens to samples that have no finite answer or reach max_sweeps: they continue one
        position at a time ("fallback"), raise a DecodingError that names block `number` ("raise"), or are
        returned as they are ("return").
    cache: keep what the conditioner computed for final positions; False trades time for memory.
    compact_at: solved rows leave the batch when this share of it or less still moves; 0 keeps them.
    watch: called with the first guess and after every sweep. The batch is then solved in one part, and
        samples that continue with a narrower window are not shown.
    """
    if z.ndim != 3 or z.shape[1] != block.length:
        raise ValueError(f"z must be [N, {block.length}, D], not {list(z.shape)}")
    began = time.perf_counter()
    method = method.resolved(calibrated=block.guess is not None)
    if method.precision == "mixed" and (z.dtype != torch.float32 or block.engine.rough() is None):
        method = replace(method, precision="float32")
    options = Options(method, on_failure, cache, compact_at, number, watch)
    with torch.inference_mode():
        own = block.to_positions(z.detach())
        solved = [solve(part, rows, options) for part, rows in _parts(block, own, whole=watch is not None)]
    return _joined(block, solved, options, time.perf_counter() - began)


def _parts(block: Block, z: Tensor, *, whole: bool) -> Iterator[tuple[Block, Tensor]]:
    """The batch in parts of the size that the backend prefers, each with its share of the block."""
    count = -(-len(z) // max(block.engine.rows or len(z), 1))
    if whole or count <= 1:
        yield block, z
        return
    for places in torch.arange(len(z), device=z.device).tensor_split(count):
        yield block.select(places), z[places]


def _joined(block: Block, solved: list[Rows], options: Options, seconds: float) -> Decoded:
    """The parts as one result, in the order of the data.

    Tensors that are joined outside inference mode are ordinary ones, which autograd may use.
    """

    def joined(name: str) -> Tensor:
        return torch.cat([getattr(rows, name) for rows in solved])

    stats = BlockStats(
        sweeps=joined("sweeps").cpu(),
        evaluated=joined("evaluated").cpu(),
        update=joined("change").cpu(),
        status=tuple(map(STATUSES.__getitem__, joined("status").tolist())),
        seconds=seconds,
        backend=block.engine.name,
        guess_sweeps=joined("guess_sweeps").cpu(),
        precision=options.method.precision,
    )
    if options.on_failure == "raise" and stats.worst.failed:
        failed = [i for i, status in enumerate(stats.status) if status.failed]
        raise DecodingError(options.number, failed, stats.worst)
    return Decoded(
        x=block.from_positions(joined("answer")[:, : block.length]),
        log_det=joined("log_slope")[:, : block.length].sum(1),
        stats=Stats(blocks=(stats,), seconds=seconds, plan=Plan((options.method,))),
    )


class Observer:
    """Calls `watch` with the state of the batch, in the order of the data."""

    def __init__(self, block: Block, options: Options, results: Rows) -> None:
        self.block, self.options, self.results, self.count = block, options, results, 0
        self.active = options.watch is not None

    def __call__(self, rows: Rows, moved: Tensor, lo: int, hi: int) -> None:
        """After a sweep over positions lo .. hi - 1 of `rows`, in which those in `moved` took part."""
        watch, results = self.options.watch, self.results
        if watch is None or not self.active:
            return
        results.put(rows)
        with torch.inference_mode(False):  # the copies are ordinary tensors
            moving = torch.zeros(len(results), dtype=torch.bool)
            moving[rows.place[moved].cpu()] = True
            x = self.block.from_positions(results.answer[:, : results.length].clone())
            watch(Sweep(block=self.options.number, number=self.count, lo=lo, hi=hi, moving=moving, x=x))
        self.count += 1


@dataclass
class Batch:
    """Rows that are swept together."""

    block: Block
    rows: Rows
    cache: Cache | None
    width: int

    def take(self, keep: Tensor, width: int) -> Batch:
        """Some of the rows, with a window of this width."""
        padding = width if width != self.width else None
        cache = None if self.cache is None else self.cache.select(keep)
        return Batch(self.block.select(keep), self.rows.take(keep, padding), cache, width)


def solve(block: Block, z: Tensor, options: Options) -> Rows:
    """The answers of one batch, z [n, T, D] in the order of positions."""
    method, (n, length, _) = options.method, z.shape
    width = min(method.width or length, length)
    engine, theta = block.engine, block.conditioner.first(n)
    if theta.dtype != z.dtype and not torch.is_autocast_enabled(z.device.type):
        raise ValueError(f"z is {z.dtype}, the network {theta.dtype}: use z.to({theta.dtype})")
    first, log_slope = engine.inverse(z[:, :1], theta)
    guess, rough = first_guess(z, method.init, block.guess), None
    if method.precision == "mixed" and (fast := engine.rough()) is not None:
        guess, rough = rough_guess(fast, z, first, guess, method)
    results = Rows.start(z, first, log_slope, guess, 0 if width in (1, length) else width)
    results.guess_sweeps = results.guess_sweeps if rough is None else rough
    cache = engine.new_cache(n) if options.cache else None
    observe = Observer(block, options, results)
    observe(results, results.moving, 0, 1)
    queue = [_moving(Batch(block, results, cache, width))]
    while queue:
        batch = queue.pop()
        advance = one_by_one if batch.width == 1 else slide
        queue += advance(batch, results, observe)
        observe.active = False  # samples that continue with a narrower window are not shown
    results.mark_unknown()
    return results


def rough_guess(
    engine: Engine, z: Tensor, first: Tensor, guess: Tensor, method: Method
) -> tuple[Tensor, Tensor]:
    """A better first guess by sweeps of an engine in bfloat16, and how many each row took, [n].

    No position becomes final and no cache is written. A row that overflows keeps its last finite guess.
    """
    x, count = guess.clone(), torch.zeros(len(z), dtype=torch.long, device=z.device)
    x[:, :1] = first.nan_to_num(0, 0, 0)
    rows, length = torch.arange(len(z), device=z.device), z.shape[1]
    for _ in range(min(method.max_sweeps or length, length - 1) if len(z) else 0):
        part, own, known = engine.select(rows), x[rows], z[rows, 1:]
        new, log_slope = part.inverse(known, part.params(own, 1, length - 1, None))
        largest = changes(new, own[:, 1:], known, log_slope, method)[0].amax(1)
        x[rows, 1:] = torch.where(largest.isfinite()[:, None, None], new, own[:, 1:])
        count[rows] += 1
        rows = rows[largest > max(ROUGH_TOL, method.tol)]  # NaN is not larger
        if not len(rows):
            break
    return x, count


def slide(batch: Batch, results: Rows, observe: Observer) -> list[Batch]:
    """Sweep until every row is solved. Returns the rows that overflowed, with narrower windows."""
    options, narrower, look = observe.options, list[Batch](), batch.rows.look()
    compact_at = options.compact_at if batch.block.engine.compacts else 0.0
    while look.count:
        moving, low = batch.rows.moving if options.watch else None, look.low
        verdict = sweep(batch, look, options.method)
        look = verdict.look
        if moving is not None:
            observe(batch.rows, moving, low, batch.rows.length)
        if look.overflowed or options.method.max_sweeps is not None:
            widths = next_widths(batch.rows, verdict, batch.width, options.method, options.on_failure)
            left = [width for width in set(widths.tolist()) if width < batch.width]
            narrower += [_narrowed(batch, (widths == width).nonzero()[:, 0], width) for width in left]
            batch = _compacted(batch, widths == batch.width, results, 1.0 if left else compact_at)
            look = batch.rows.look()
        elif look.count <= compact_at * len(batch.rows):
            batch = _compacted(batch, batch.rows.moving, results, compact_at)
    results.put(batch.rows)
    return narrower


def sweep(batch: Batch, look: Look, method: Method) -> Verdict:
    """x_t <- f^-1(z_t; theta_t(x_{<t})) for all positions t of each row's window; what became of the rows."""
    rows, engine = batch.rows, batch.block.engine
    window = rows.window(batch.width, look)
    theta = engine.params(rows.x, window.start, window.width, batch.cache)
    new, log_slope = engine.inverse(window.take(rows.z), theta)
    return engine.accept(rows, window, batch.width, new, log_slope, method, cached=batch.cache is not None)


def one_by_one(batch: Batch, results: Rows, observe: Observer) -> list[Batch]:
    """Sequential decoding from each row's frontier on; rows of one frontier are solved together."""
    rows, engine, length = batch.rows, batch.block.engine, batch.rows.length
    if not len(rows):
        return []
    low, high = torch.stack(rows.frontier.aminmax()).tolist()
    if low != high:
        every = sorted(set(rows.frontier.tolist()))
        return [batch.take((rows.frontier == f).nonzero()[:, 0], 1) for f in every]
    x, slopes, watched = rows.x, rows.log_slope[:, :length], observe.active
    step = 1 if watched else length
    for start in range(low, length, step):
        engine.solve(x, rows.z, slopes, start, min(start + step, length), batch.cache)
        if watched:
            rows.answer[:, start] = x[:, start]
            observe(rows, rows.moving, start, start + 1)
    rows.finish(low, cached=batch.cache is not None)
    results.put(rows)
    return []


def _moving(batch: Batch) -> Batch:
    """The rows that are not solved yet."""
    moving = batch.rows.moving
    return batch if bool(moving.all()) else batch.take(moving.nonzero()[:, 0], batch.width)


def _narrowed(batch: Batch, keep: Tensor, width: int) -> Batch:
    """Rows that overflowed, ready to continue from their own frontiers."""
    fewer = batch.take(keep, width)
    if fewer.cache is not None:
        fewer.cache.zero_nonfinite()
    if width == 1:
        fewer.rows.clear_beyond_frontier()
    return fewer


def _compacted(batch: Batch, stay: Tensor, results: Rows, compact_at: float) -> Batch:
    """The batch without rows that left, and without solved ones if they are enough to pay for the copies."""
    moving = batch.rows.moving
    stay = stay & moving
    keep = stay.nonzero()[:, 0]
    left = bool((moving & ~stay).any())
    if not left and not 0 < len(keep) <= min(compact_at * len(stay), len(stay) - 1):
        return batch
    done = (~moving).nonzero()[:, 0]
    if len(done):
        results.put(batch.rows.take(done))
    return batch.take(keep, batch.width)
