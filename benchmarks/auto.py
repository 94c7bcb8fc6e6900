"""plan="auto" against the best of the named plans, on every bundled model and batch size.

A named plan competes if its largest deviation from sequential decoding, over the same samples as auto's, is
within the bound. Plans run in turn.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks.harness import Row
from jacobiflow.flows.checkpoint import bundled_names

BATCHES = (1, 4, 16, 64)
ROWS = 64  # samples, at least, that deviations are measured on
SECONDS = 20.0  # a plan that takes longer runs once
NAMED = ("sequential", "uniform", "selective")


class Samples:
    """Noise for batches of one size, and plans run on it."""

    def __init__(self, flow: jf.Flow, batch: int) -> None:
        self.flow, self.batch, self.n = flow, batch, max(batch, ROWS)
        self.z, self.labels = flow.noise(self.n, seed=0), flow.every_label(self.n)
        self.exact = self.decode(flow.plan("sequential"), slice(0, self.n))

    def decode(self, plan: jf.Plan, rows: slice) -> Tensor:
        labels = None if self.labels is None else self.labels[rows]
        return self.flow.decode(self.z[rows], plan, labels=labels).x

    def seconds(self, plan: jf.Plan, turn: int) -> float:
        begin = turn * self.batch % (self.n - self.batch + 1)
        began = time.perf_counter()
        self.decode(plan, slice(begin, begin + self.batch))
        return time.perf_counter() - began

    def deviation(self, plan: jf.Plan) -> float:
        """The largest deviation, in the unit of the flow's bound."""
        off = (self.decode(plan, slice(0, self.n)) - self.exact).abs()
        if self.flow.default_unit == "relative":
            off = off / self.exact.std(0)
        return float(off.max())


def row(name: str, flow: jf.Flow, batch: int, repeats: int) -> Row:
    bound, samples = flow.default_deviation, Samples(flow, batch)
    auto = flow.plan("auto", n=batch)
    named = {plan: flow.plan(plan) for plan in NAMED}
    off = {plan: samples.deviation(methods) for plan, methods in named.items()}
    racers = {"auto": auto, **{plan: named[plan] for plan in NAMED if off[plan] <= bound}}
    times: dict[str, list[float]] = {plan: [samples.seconds(racers[plan], 0)] for plan in racers}
    for turn in range(1, repeats if max(times["auto"]) < SECONDS else 1):
        for plan, methods in racers.items():
            times[plan].append(samples.seconds(methods, turn))
    seconds = {plan: statistics.median(times[plan]) for plan in racers}
    best = min((plan for plan in racers if plan != "auto"), key=lambda plan: seconds[plan])
    ratio = statistics.median(b / a for a, b in zip(times["auto"], times[best], strict=True))
    return {
        "model": name,
        "batch": batch,
        "auto_seconds": seconds["auto"],
        "deviation": samples.deviation(auto),
        "best_named": best,
        "best_named_seconds": seconds[best],
        "best_named_deviation": off[best],
        "auto_ratio": ratio,
        "plan": ", ".join("1" if m.width == 1 else f"{m.width or 'whole'} at {m.tol:g}" for m in auto),
    }


def rows(repeats: int) -> list[Row]:
    """Every bundled model."""
    found = []
    for name in bundled_names():
        flow = jf.load(name)
        with torch.no_grad():
            for batch in BATCHES:
                found.append(row(name, flow, batch, repeats))
                print("   ", found[-1], flush=True)
    return found
