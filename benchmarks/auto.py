"""plan="auto" against the best fixed plan at each batch size.

A fixed plan competes if its largest deviation from sequential decoding, over the same samples as auto's, is
within the bound. All are timed; the fastest that keep it then run in turn with auto, which was tuned afresh.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks.harness import Row
from benchmarks.tarflow import empty_cache

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROWS = 64  # samples, at least, that deviations are measured on
FINALISTS = 3


def fixed_plans(flow: jf.Flow, bound: float) -> dict[str, jf.Plan]:
    """Sequential, uniform, selective, and windows in all blocks but the first."""
    rest = len(flow.blocks) - 1
    plans = {"sequential": flow.plan("sequential")}
    for tol in (float(f"{share * bound:.3g}") for share in (10, 3, 1, 0.3)):
        plans |= {f"{name} {tol:g}": flow.plan(name, tol=tol) for name in ("uniform", "selective")}
        for width in (8, 16):
            method = jf.Method(width=width, tol=tol)
            plans[f"windows {width} {tol:g}"] = jf.Plan((jf.Method(width=1), *(method,) * rest))
    return plans


class Samples:
    """Noise for batches of one size, and plans run on it."""

    def __init__(self, flow: jf.Flow, batch: int) -> None:
        self.flow, self.batch, self.n = flow, batch, max(batch, ROWS)
        self.z, self.labels = flow.noise(self.n, seed=0), torch.arange(self.n) % 10
        self.exact = self.decode(flow.plan("sequential"), slice(0, self.n))

    def decode(self, plan: jf.Plan, rows: slice) -> Tensor:
        return self.flow.decode(self.z[rows], plan, labels=self.labels[rows]).x

    def seconds(self, plan: jf.Plan, turn: int) -> float:
        begin = turn * self.batch % (self.n - self.batch + 1)
        began = time.perf_counter()
        self.decode(plan, slice(begin, begin + self.batch))
        return time.perf_counter() - began

    def deviation(self, plan: jf.Plan) -> float:
        return float((self.decode(plan, slice(0, self.n)) - self.exact).abs().max())


def row(flow: jf.Flow, batch: int, repeats: int) -> Row:
    bound, samples = flow.default_deviation, Samples(flow, batch)
    began = time.perf_counter()
    with empty_cache():
        auto = flow.plan("auto", n=batch, labels=samples.labels[:batch])
    tuning = time.perf_counter() - began
    fixed = {name: p for name, p in fixed_plans(flow, bound).items() if p != auto}
    first = {name: min(samples.seconds(p, 0) for _ in range(2)) for name, p in fixed.items()}
    off: dict[str, float] = {}
    for name in sorted(fixed, key=lambda name: first[name]):
        found = samples.deviation(fixed[name])
        if found <= bound:
            off[name] = found
        if len(off) == FINALISTS:
            break
    racers = {"auto": auto, **{name: fixed[name] for name in off}}
    times: dict[str, list[float]] = {name: [] for name in racers}
    for turn in range(repeats):
        for name, plan in racers.items():
            times[name].append(samples.seconds(plan, turn))
    ratios = {n: statistics.median(t / a for t, a in zip(times[n], times["auto"], strict=True)) for n in off}
    best = min(ratios, key=lambda name: ratios[name])
    return {
        "batch": batch,
        "auto_seconds": statistics.median(times["auto"]),
        "deviation": samples.deviation(auto),
        "best_fixed": best,
        "best_fixed_seconds": statistics.median(times[best]),
        "best_fixed_deviation": off[best],
        "auto_ratio": ratios[best],
        "tuning_seconds": tuning,
        "plan": ", ".join("1" if m.width == 1 else f"{m.width or 'whole'} at {m.tol:g}" for m in auto),
    }


def rows(repeats: int) -> list[Row]:
    """The bundled `mnist`; a plan that is auto's does not race against itself."""
    flow, found = jf.load("mnist"), []
    for batch in BATCHES:
        found.append(row(flow, batch, repeats))
        print("   ", found[-1], flush=True)
    return found
