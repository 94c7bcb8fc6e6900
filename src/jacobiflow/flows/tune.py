"""`tune`: the fastest plan of a flow on this machine, timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core import arguments
from jacobiflow.core.block import Block
from jacobiflow.core.hardware import processor_name
from jacobiflow.core.method import Init, Plan
from jacobiflow.core.records import as_json
from jacobiflow.flows.calibration import calibrate
from jacobiflow.flows.compare import agree
from jacobiflow.flows.cost_model import Clock
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.plans import MARGIN, Choice, choices, deviation_bound, entry_of, keep, pick
from jacobiflow.flows.profile import deviation, deviation_unit, in_turn, measure_profile, solve
from jacobiflow.kernels.threads import torch_single_threaded

ROWS = 64  # fresh samples, at least, that every plan is verified on
SEED = 2**31 - 3  # of that noise
RACERS = 6  # plans, beside sequential decoding, that are timed
FEWEST_TURNS, MOST_TURNS = 5, 21  # runs of each plan; they end when all speed-ups are stable
SHARES = (1.0, 0.5, 0.2)  # of the bound that candidates spend


@dataclass(eq=False)
class Trial:
    """A plan, the seconds that were predicted for it, and what was measured."""

    plan: Plan
    predicted: float
    deviation: float = 0.0
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return statistics.median(self.times) if self.times else math.nan

    def about(self, exact: Trial) -> Any:
        """As plain data; exact: sequential decoding, beside which it was timed."""
        numbers = {name: getattr(self, name) for name in ("predicted", "seconds", "deviation")}
        return as_json({"methods": [asdict(m) for m in self.plan], "stable": agree(exact.times, self.times)} | numbers)


@torch.no_grad()
def tune(
    flow: Flow,
    batch_size: int = 16,
    max_deviation: float | None = None,
    *,
    labels: arguments.Labels | None = None,
    context: Tensor | None = None,
    guidance: float | Guidance = 0.0,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The fastest plan for `batch_size` samples at once, timed on this machine.

    First guesses and convergence profile are measured where the flow has none, and plan="auto" uses them from now
    on. Then the plans that the cost model predicts to be fastest race named plans on fresh noise. A plan takes part
    if its samples stay within `max_deviation` of sequential decoding (default: 0.05 for TarFlow; 1e-4 standard
    deviations for MAF and NSF), with a margin of a fifth. The bound is measured, not guaranteed for every sample to
    come. `about` says what was tried.

    labels, context: of the samples, or a few that are used in turn.

    >>> from jacobiflow import MAF, MAFConfig
    >>> flow = MAF(MAFConfig(features=4, blocks=2, hidden=(16,)))
    >>> plan = tune(flow, batch_size=2)
    >>> len(plan), plan.about["setting"]["batch"]
    (2, 2)
    """
    arguments.instance(Flow, flow, "tune")
    arguments.function("progress", progress)
    batch, bound = arguments.as_int("batch_size", batch_size, 1), deviation_bound(flow, max_deviation)
    guide, rows = Guidance.of(guidance), batch * -(-ROWS // batch)
    z = flow.to_prior(flow.noise(rows, SEED))
    if labels is not None:
        labels = arguments.labels(labels, None, flow.num_classes, next(flow.parameters()).device)
    labels, context = in_turn(labels, rows), in_turn(context, rows)
    bound_blocks = partial(flow.bound_blocks, rows, labels=labels, context=context, guidance=guide)
    bound_blocks()  # raises if they do not fit
    guide.refuse_idle(labels)
    guesses, entry = flow.guesses(), entry_of(flow, guide)
    parts = 1 + (guesses is None) + (entry is None)

    def say(part: int, text: str) -> None:
        progress(f"{text} (part {part} of {parts})" if parts > 1 else text)

    if guesses is None:
        calibrate(flow, progress=partial(say, 1))
    if entry is None:
        entry = measure_profile(flow, guide, context=context, progress=partial(say, parts - 1))
        keep(flow)
    assert entry is not None
    stack, clock = bound_blocks(), clock or clock_of(z.device)
    known = choices(flow, batch, entry, guidance=guide, context=context, clock=clock)
    exact, *others = _candidates(flow, known, bound)
    steps, most = count(1), 1 + len(others) + MOST_TURNS

    def step() -> None:
        say(parts, f"plans, step {next(steps)} of at most {most}")

    step()
    answer = flow.from_sequence(solve(stack, z, exact.plan))
    unit = deviation_unit(flow, answer)
    for trial in others:
        step()
        trial.deviation = deviation(flow.from_sequence(solve(stack, z, trial.plan)), answer, unit)
    racers = [exact, *[t for t in others if t.deviation <= MARGIN * bound][:RACERS]]
    _race(racers, stack, z, batch, clock, step)
    best = min(racers, key=lambda t: t.seconds)
    measured = {"seconds": best.seconds, "sequential_seconds": exact.seconds, "speedup": exact.seconds / best.seconds}
    measured |= {"stable": agree(exact.times, best.times), "predicted_speedup": exact.predicted / best.predicted}
    measured |= {"deviation": best.deviation, "rows": rows}
    machine = {"machine": processor_name(z.device), "device": z.device.type, "threads": torch.get_num_threads()}
    setting = machine | {"batch": batch, "guidance": asdict(guide), "max_deviation": bound}
    tried = [t.about(exact) for t in (exact, *others)]
    return Plan(best.plan.methods, about={"setting": setting, "measured": measured, "tried": tried})


def _candidates(flow: Flow, rows: list[list[Choice]], bound: float) -> list[Trial]:
    """Sequential decoding, then by predicted seconds: the best plans, those of one width, named ones, new guesses."""

    def trial(plan: Plan) -> Trial:
        pairs = zip(rows, plan, strict=True)
        return Trial(plan, sum(next(c.seconds for c in row if c.method == m) for row, m in pairs))

    exact = trial(Plan(tuple(row[-1].method for row in rows)))
    trials = [trial(pick(rows, share * MARGIN * bound)) for share in SHARES]
    for width in {c.method.width for row in rows for c in row}:
        only = [[c for c in row if c.method.width in (width, 1)] for row in rows]
        trials.append(trial(pick(only, MARGIN * bound)))
    best = min(trials, key=lambda t: t.predicted)
    others = [flow.plan(name, tol=tol * bound) for name in ("selective", "uniform") for tol in (10, 2, 0.4)]
    inits: tuple[Init, ...] = ("previous", "zeros")
    others += [Plan(tuple(m if m.width == 1 else replace(m, init=init) for m in best.plan)) for init in inits]
    trials += [Trial(plan, best.predicted) for plan in others]
    unique = {t.plan: t for t in reversed(trials) if t.plan != exact.plan}
    return [exact, *sorted(unique.values(), key=lambda t: t.predicted)]


def _race(
    racers: list[Trial], stack: list[Block], z: Tensor, batch: int, clock: Clock, begin: Callable[[], None]
) -> None:
    """Time plans by turns, sequential decoding the first, on one batch of z after the other."""
    with torch_single_threaded(z[:batch]):
        for turn in range(MOST_TURNS):
            if turn >= FEWEST_TURNS and all(agree(racers[0].times, t.times) for t in racers):
                break
            begin()
            rows = torch.arange(batch, device=z.device) + turn * batch % len(z)
            some = [block.select(rows) for block in stack]
            for trial in racers:
                began = clock()
                solve(some, z[rows], trial.plan)
                trial.times.append(clock() - began)


def clock_of(device: torch.device) -> Clock:
    """Seconds, after the device has done what it was given."""

    def seconds() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return seconds
