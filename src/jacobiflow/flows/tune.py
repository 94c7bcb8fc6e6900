"""`tune`: the fastest plan of a flow on this machine, timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.hardware import processor_name
from jacobiflow.core.method import Init, Plan
from jacobiflow.flows.arguments import as_int, instance
from jacobiflow.flows.auto_plan import MARGIN, Choice, choices, deviation_bound, entry_of, keep, pick
from jacobiflow.flows.calibration import calibrate
from jacobiflow.flows.compare import agree
from jacobiflow.flows.cost_model import Clock
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.profile import deviation, deviation_unit, measure_profile, solve
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
    deviation: float = math.nan
    times: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """The median of its runs."""
        return statistics.median(self.times) if self.times else math.nan

    def about(self, exact: Trial) -> dict[str, Any]:
        """As plain data; exact: sequential decoding, beside which it was timed."""
        numbers = {"predicted": self.predicted, "seconds": self.seconds, "deviation": self.deviation}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        return {"methods": [asdict(m) for m in self.plan], "stable": agree(exact.times, self.times), **finite}


@torch.no_grad()
def tune(
    flow: Flow,
    batch_size: int = 16,
    max_deviation: float | None = None,
    *,
    labels: int | Tensor | None = None,
    context: Tensor | None = None,
    guidance: float | Guidance = 0.0,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The fastest plan for `batch_size` samples at once, timed on this machine.

    Where the flow has no first guesses or no convergence profile, they are measured and given to it, so that
    plan="auto" uses them from now on. Then the plans that the cost model predicts to be fastest race named
    plans on fresh noise. A plan takes part if its samples stay within `max_deviation` of sequential decoding
    (default: 0.05 for TarFlow; 1e-4 standard deviations for MAF and NSF), with a margin of a fifth. The bound
    is measured; it is not guaranteed for every sample to come. `about` says what was tried.

    labels, context: of the samples, or a few that are used in turn.

    >>> from jacobiflow import MAF, MAFConfig
    >>> flow = MAF(MAFConfig(features=4, blocks=2, hidden=(16,)))
    >>> plan = tune(flow, batch_size=2)
    >>> len(plan), plan.about["setting"]["batch"]
    (2, 2)
    """
    instance(Flow, flow)
    batch, bound = as_int("batch_size", batch_size, 1), deviation_bound(flow, max_deviation)
    guide = Guidance.of(guidance)
    rows = batch * math.ceil(ROWS / batch)
    labels, context = _in_turn(labels, rows), _in_turn(context, rows)
    flow.bound_blocks(rows, labels=labels, context=context, guidance=guide)  # raises if they do not fit
    guide.refuse_idle(labels)
    if flow.guesses() is None:
        calibrate(flow, progress=progress)
    if entry_of(flow, guide) is None:
        measure_profile(flow, guide, context=context, progress=lambda text: progress(f"profile, {text}"))
        keep(flow)
    race = _Race(flow, labels, context, guide, rows, batch, clock or clock_of(next(flow.parameters()).device))
    tried = race.run(list(_candidates(flow, race, batch, bound, guide, context)), bound, progress)
    best = min((t for t in tried if t.times), key=lambda t: t.seconds)
    exact = tried[0]
    measured = {
        "seconds": best.seconds,
        "sequential_seconds": exact.seconds,
        "speedup": exact.seconds / best.seconds,
        "stable": agree(exact.times, best.times),
        "predicted_speedup": exact.predicted / best.predicted,
        "deviation": best.deviation,
        "rows": rows,
    }
    setting = {
        "machine": processor_name(race.z.device),
        "device": race.z.device.type,
        "threads": torch.get_num_threads(),
        "batch": batch,
        "guidance": asdict(guide),
        "max_deviation": bound,
    }
    about = {"setting": setting, "measured": measured, "tried": [t.about(exact) for t in tried]}
    return Plan(best.plan.methods, about=about)


def _in_turn(values: Any, rows: int) -> Any:
    """Rows of labels [k] or context [k, C] in turn; a single label or context stays as it is."""
    many = isinstance(values, Tensor) and values.ndim == 1 + values.is_floating_point() and len(values)
    return values[torch.arange(rows, device=values.device) % len(values)] if many else values


def _candidates(
    flow: Flow, race: _Race, batch: int, bound: float, guidance: Guidance, context: Tensor | None
) -> Iterator[Trial]:
    """Sequential decoding, then plans worth timing: the predicted best, other first guesses, named plans."""
    entry = entry_of(flow, guidance)
    assert entry is not None
    rows = choices(flow, batch, entry, guidance=guidance, context=context, clock=race.clock)
    yield Trial(_exact(rows), _predicted(rows, _exact(rows)))
    trials = [_trial(rows, pick(rows, share * MARGIN * bound)) for share in SHARES]
    for width in {c.method.width for row in rows for c in row}:
        only = [[c for c in row if c.method.width in (width, 1)] for row in rows]
        trials.append(_trial(rows, pick(only, MARGIN * bound)))
    best = min(trials, key=lambda t: t.predicted)
    for name in ("selective", "uniform"):
        tols = (10 * bound, 2 * bound, 0.4 * bound)
        trials += [Trial(flow.plan(name, tol=tol), best.predicted) for tol in tols]
    inits: tuple[Init, ...] = ("previous", "zeros")
    for init in inits:
        other = tuple(m if m.width == 1 else replace(m, init=init) for m in best.plan)
        trials.append(Trial(Plan(other), best.predicted))
    yield from trials


def _exact(rows: list[list[Choice]]) -> Plan:
    return Plan(tuple(row[-1].method for row in rows))


def _trial(rows: list[list[Choice]], plan: Plan) -> Trial:
    return Trial(plan, _predicted(rows, plan))


def _predicted(rows: list[list[Choice]], plan: Plan) -> float:
    return sum(next(c.seconds for c in row if c.method == m) for row, m in zip(rows, plan, strict=True))


class _Race:
    """Plans on the same fresh noise, verified on all of it and timed batch by batch."""

    def __init__(
        self, flow: Flow, labels: Any, context: Any, guidance: Guidance, rows: int, batch: int, clock: Clock
    ) -> None:
        self.flow, self.batch, self.clock = flow, batch, clock
        self.z = flow.to_prior(flow.noise(rows, SEED))
        self.stack = flow.bound_blocks(rows, labels=labels, context=context, guidance=guidance)

    def run(self, trials: list[Trial], bound: float, progress: Callable[[str], None]) -> list[Trial]:
        """Verify all plans, time the exact one and the most promising. Returns those that ran."""
        exact = trials[0]
        unique = {t.plan: t for t in reversed(trials)}
        others = sorted((t for p, t in unique.items() if p != exact.plan), key=lambda t: t.predicted)
        progress("exact answers")
        answer = self.flow.from_sequence(solve(self.stack, self.z, exact.plan.methods))
        unit, exact.deviation = deviation_unit(self.flow, answer), 0.0
        racers = [exact]
        for i, trial in enumerate(others):
            progress(f"the deviation of plan {i + 1} of {len(others)}")
            x = self.flow.from_sequence(solve(self.stack, self.z, trial.plan.methods))
            trial.deviation = deviation(x, answer, unit)
            if trial.deviation <= MARGIN * bound and len(racers) <= RACERS:
                racers.append(trial)
        with torch_single_threaded(self.z[: self.batch]):
            for turn in range(MOST_TURNS):
                if turn >= FEWEST_TURNS and all(agree(exact.times, t.times) for t in racers):
                    break
                progress(f"{len(racers)} plans by the clock, run {turn + 1} of at most {MOST_TURNS}")
                self.turn(racers, turn)
        return [exact, *(t for t in others if not math.isnan(t.deviation))]

    def turn(self, racers: list[Trial], number: int) -> None:
        """One batch by every plan."""
        first = number * self.batch % len(self.z)
        rows = torch.arange(first, first + self.batch, device=self.z.device)
        stack = [block.select(rows) for block in self.stack]
        for trial in racers:
            began = self.clock()
            solve(stack, self.z[rows], trial.plan.methods)
            trial.times.append(self.clock() - began)


def clock_of(device: torch.device) -> Clock:
    """Seconds, after the device has done what it was given."""
    if device.type != "cuda":
        return time.perf_counter

    def seconds() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return seconds
