"""Other roads to the inverse of a block, each against our own decoding of the same block, to the same tol.

Each is tried on the second block of the bundled models, on its exact input. `sweeps worth` is what it put
through the conditioner, in whole sequences. Only the windows are in the package: nothing else has won.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks.harness import Row

N = 16
Road = Callable[[jf.Block, Tensor, float], tuple[Tensor, float]]  # x and evaluations of whole sweeps


def sweep(block: jf.Block, x: Tensor, z: Tensor) -> Tensor:
    return block.sweep(x, z)[0]


@torch.inference_mode()
def plain(block: jf.Block, z: Tensor, tol: float, x: Tensor | None = None) -> tuple[Tensor, float]:
    """Sweeps over the whole sequence, no cache: what the roads below change in one place."""
    x = z.clone() if x is None else x
    for k in range(1, block.length + 1):
        new = sweep(block, x, z)
        moved = (new - x).abs().max()
        x = new
        if moved <= tol:
            return x, k
    return x, block.length


@torch.inference_mode()
def anderson(block: jf.Block, z: Tensor, tol: float, memory: int = 3) -> tuple[Tensor, float]:
    """Anderson acceleration: the mix of the last guesses whose mixed update is smallest, a sample each."""
    x, shape = z.clone(), z.shape
    points: list[Tensor] = []
    moves: list[Tensor] = []
    for k in range(1, block.length + 1):
        move = (sweep(block, x, z) - x).flatten(1)
        if move.abs().max() <= tol:
            return x + move.view(shape), k
        points, moves = [*points[-memory:], x.flatten(1)], [*moves[-memory:], move]
        if len(points) == 1:
            x = x + move.view(shape)
            continue
        f = torch.stack(moves, 2)
        df = f[:, :, 1:] - f[:, :, :-1]
        dx = torch.stack(points, 2).diff(dim=2)
        gram = df.mT @ df
        gram = gram + 1e-6 * gram.diagonal(dim1=1, dim2=2).amax(1)[:, None, None] * torch.eye(gram.shape[1])
        gamma = torch.linalg.solve(gram, df.mT @ move.unsqueeze(2))
        x = (points[-1] + move - ((dx + df) @ gamma)[:, :, 0]).view(shape)
        x = torch.where(x.isfinite(), x, z)
    return x, block.length


def ours(width: int | None) -> Road:
    """Our own decoding; the window is the whole sequence without a width."""

    def run(block: jf.Block, z: Tensor, tol: float) -> tuple[Tensor, float]:
        out = jf.decode(block, z, jf.Method(width=width, tol=tol))
        return out.x, out.stats.blocks[0].evaluated.double().mean().item() / block.length

    return run


def guess_of(kind: str) -> Road:
    """First guesses that should beat the block's own input."""

    @torch.inference_mode()
    def run(block: jf.Block, z: Tensor, tol: float) -> tuple[Tensor, float]:
        if kind == "mean answer":  # of other noise, solved once beforehand
            return plain(block, z, tol, MEANS[id(block)].expand_as(z).clone())
        small = block.select(torch.arange(0, len(z), 4))
        near = jf.decode(small, z[::4], jf.Method(width=1)).x.repeat_interleave(4, 0)[: len(z)]
        return plain(block, z, tol, near)

    return run


MEANS: dict[int, Tensor] = {}


def halved(block: jf.Block, z: Tensor, tol: float) -> tuple[Tensor, float]:
    """Sweeps in bfloat16 until they stand at its resolution, then in float32."""
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        x, first = plain(block, z, max(tol, 0.05))
    x, rest = plain(block, z, tol, x.float())
    return x, first + rest


def grouped(block: jf.Block, z: Tensor, tol: float) -> tuple[Tensor, float]:
    """Half of the rows on each of two threads, which meet at the end only."""

    def half(rows: Tensor) -> Tensor:
        torch.set_num_threads(1)
        return jf.decode(block.select(rows), z[rows], jf.Method(tol=tol)).x

    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(half, torch.arange(len(z)).chunk(2)))
    return torch.cat(parts), float("nan")


ROADS: dict[str, Road] = {
    "ours: settled prefix cached": ours(None),
    "plain sweeps, no cache": plain,
    "Anderson, three guesses": anderson,
    "sliding window, 8": ours(8),
    "sliding window, 16": ours(16),
    "first guess: mean answer": guess_of("mean answer"),
    "first guess: a neighbour's answer": guess_of("neighbour"),
    "bfloat16 first": halved,
    "rows in two threads": grouped,
}


def rows(repeats: int) -> list[Row]:
    """The second block of `mnist-small` (the first is decoded sequentially) and of `mnist-maf`."""
    found: list[Row] = []
    for model, tol in (("mnist-small", 0.05), ("mnist-maf", 1e-4)):
        flow = jf.load(model)
        labels = {"labels": torch.arange(N) % 10} if flow.num_classes else {}
        first, block = flow.bound_blocks(N, **labels)[:2]
        z = jf.decode(first, flow.to_prior(flow.noise(N, seed=0)), jf.Method(width=1)).x
        exact = jf.decode(block, z, jf.Method(width=1)).x
        MEANS[id(block)] = exact.roll(1, 0).mean(0, keepdim=True)
        times: dict[str, list[float]] = {name: [] for name in ROADS}
        outs: dict[str, tuple[Tensor, float]] = {}
        for again in range(repeats + 1):
            for name, road in ROADS.items():
                began = time.perf_counter()
                outs[name] = road(block, z, tol)
                if again:
                    times[name].append(time.perf_counter() - began)
        base = times["ours: settled prefix cached"]
        for name, (x, evaluations) in outs.items():
            row: Row = {"model": model, "road": name, "seconds": statistics.median(times[name])}
            row["ratio"] = statistics.median(a / b for a, b in zip(base, times[name], strict=True))
            row["sweeps_worth"] = None if evaluations != evaluations else float(evaluations)
            row["deviation"] = float((x - exact).abs().max())
            print("   ", row, flush=True)
            found.append(row)
    return found
