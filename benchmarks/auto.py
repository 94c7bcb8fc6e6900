"""plan="auto" against the best of the named plans, on every bundled model and batch size.

A named plan competes if its largest deviation from sequential decoding, over the same samples as auto's, is
within the bound. Plans run in turn, and each round begins with another one. `series` counts network
evaluations, `guesses` the sweeps that first guesses save; both are counts, not times.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks.harness import Row
from jacobiflow.flows.checkpoint import bundled_names
from jacobiflow.flows.plans import MARGIN, Choice, pick

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
    order = list(racers)
    for turn in range(1, repeats if max(times["auto"]) < SECONDS else 1):
        for i in range(len(order)):
            plan = order[(turn + i) % len(order)]
            times[plan].append(samples.seconds(racers[plan], turn))
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


def tarflows() -> list[tuple[str, jf.Flow]]:
    """The bundled TarFlows that have a profile."""
    flows = [(name, jf.load(name)) for name in bundled_names()]
    return [(name, flow) for name, flow in flows if isinstance(flow, jf.TarFlow) and flow.profile is not None]


@torch.no_grad()
def series(repeats: int) -> list[Row]:
    """Network evaluations in series per sample: the paper's plan, and the plan with the fewest.

    The fewest by the profile, within the deviation: what counts where a call costs the same for any width.
    """
    found = []
    for name, flow in tarflows():
        samples, bound = Samples(flow, 1), flow.default_deviation
        cells = flow.profile.entry(jf.Guidance()).blocks  # type: ignore[union-attr]
        exact = Choice(jf.Method(width=1), flow.sequence_shape[0] - 1, 0.0)
        plain = [[c for c in row if c.precision == "float32"] for row in cells]  # bfloat16 saves no evaluation
        choices = [[*(Choice(c.method, statistics.mean(c.sweeps), c.deviation) for c in row), exact] for row in plain]
        plans = {"selective": flow.plan("selective", init="zeros"), "fewest": pick(choices, MARGIN * bound)}
        row: Row = {"model": name, "length": flow.sequence_shape[0]}
        for kind, plan in plans.items():
            out = flow.decode(samples.z, plan, labels=samples.labels)
            row[f"{kind}_evaluations"] = sum(float(b.sweeps.double().mean()) for b in out.stats.blocks)
            row[f"{kind}_deviation"] = float((out.x - samples.exact).abs().max())
        row["ratio"] = row["fewest_evaluations"] / row["selective_evaluations"]
        found.append(row)
        print("   ", row, flush=True)
    return found


@torch.no_grad()
def guesses(repeats: int) -> list[Row]:
    """Whole sweeps until the error of a block is at most 0.05, from its own exact input, by first guess."""
    found = []
    for name, flow in tarflows():
        labels = flow.every_label(ROWS)
        z = flow.to_prior(flow.noise(ROWS, seed=0))
        for i, block in enumerate(flow.bound_blocks(ROWS, labels=labels)):
            exact = jf.decode(block, z, jf.Method(width=1)).x
            row: Row = {"model": name, "block": i + 1}
            for init in ("zeros", "previous", "calibrated"):
                row[init] = _sweeps_until(block, z, exact, jf.Method(init=init, max_sweeps=block.length))
            row["ratio"] = row["calibrated"] / row["previous"]
            found.append(row)
            print("   ", row, flush=True)
            z = exact
        later = [row["ratio"] for row in found if row["model"] == name and row["block"] in (2, 3, 4)]
        found.append({"model": name, "block": "mean of 2 to 4", "ratio": statistics.mean(later)})
    return found


def _sweeps_until(block: jf.Block, z: Tensor, exact: Tensor, method: jf.Method, error: float = 0.05) -> float:
    """The mean number of sweeps of the samples until they are within `error` of the exact answer."""
    count = torch.full((len(z),), -1)

    def watch(sweep: jf.Sweep) -> None:
        near = (sweep.x - exact).flatten(1).abs().amax(1) <= error
        count[(count < 0) & near] = sweep.number

    jf.decode(block, z, method, watch=watch)
    assert (count >= 0).all()
    return float(count.double().mean())
