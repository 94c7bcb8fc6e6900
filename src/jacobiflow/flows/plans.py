"""What the `plan` argument of a flow stands for; "auto" goes by the flow's profile and the machine's costs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jacobiflow.core.arguments import as_int, number, word
from jacobiflow.core.files import cache_folder, own_folder
from jacobiflow.core.method import INITS, Init, Method, Plan, PlanError
from jacobiflow.core.tables import did_you_mean
from jacobiflow.flows.calibration import Calibration
from jacobiflow.flows.cost_model import Clock, costs_of
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.profile import Entry, Profile
from jacobiflow.kernels.backend import Backend
from jacobiflow.kernels.threads import torch_single_threaded

if TYPE_CHECKING:
    from jacobiflow.flows.flow import Flow

PLANS = ("sequential", "uniform", "selective", "auto")
SWEPT = ("uniform", "selective")  # the names that take tol and init
MARGIN = 0.8  # share of the bound that is used: noise to come may deviate more than the noise measured
GAIN = 0.9  # share of sequential decoding's predicted time that a plan must keep to: near a tie predictions differ
LEVELS = 200  # steps in which the deviation is shared out among the blocks
LARGEST_BATCH = 256  # plans for larger batches are those for this one


def resolve_plan(
    flow: Flow,
    plan: str | Path | Plan | None = None,
    *,
    tol: float | None = None,
    init: Init | None = None,
    max_deviation: float | None = None,
    n: int = 1,
    context: Tensor | None = None,
    guidance: float | Guidance = 0.0,
    backend: Backend | None = None,
) -> Plan:
    """The Plan that a name, a path, a Plan or None stands for, with every default spelled out.

    None is "auto", or "selective" with `tol` or `init`. n (how many samples are decoded at once), context, guidance
    and backend are for "auto".
    """
    if plan is None:
        plan = "auto" if tol is None and init is None else "selective"
    if not isinstance(plan, str | Path | Plan):
        raise PlanError(f"a plan is a name, a jf.Plan or a path, not {short(plan)}")
    if max_deviation is not None and plan != "auto":
        raise TypeError("max_deviation belongs to plan 'auto', the default: other plans have their own tol")
    if isinstance(plan, str) and plan in SWEPT:
        if init is not None:
            word("init", init, INITS)
        tol = flow.default_tol if tol is None else tol
        uniform = Plan.uniform(len(flow.blocks), tol=tol, init=init)
        found = uniform if plan == "uniform" else flow.selective(tol, init)
    elif tol is not None or init is not None:
        raise TypeError("tol and init belong to plans 'uniform' and 'selective': leave them out")
    elif plan == "auto":
        n, guide, bound = as_int("n", n), Guidance.of(guidance), deviation_bound(flow, max_deviation)
        found = auto_plan(flow, n, bound=bound, context=context, guidance=guide, backend=backend)
    elif plan == "sequential":
        found = Plan.sequential(len(flow.blocks))
    elif isinstance(plan, str) and not plan.endswith(".json") and not os.path.exists(plan):
        known, hint = ", ".join(PLANS), did_you_mean(plan, PLANS)
        raise PlanError(f"no plan is called {short(plan)}{hint}: use {known}, a jf.Plan or a JSON file")
    else:
        found = plan if isinstance(plan, Plan) else Plan.load(plan)
    if len(found) != len(flow.blocks):
        raise PlanError(f"the plan has {len(found)} methods, the flow {len(flow.blocks)} blocks")
    if any(m.init == "calibrated" for m in found) and flow.guesses() is None:
        recall(flow)
    return found.resolved(flow.default_unit, calibrated=flow.guesses() is not None)


@dataclass(frozen=True)
class Choice:
    """One way to solve a block."""

    method: Method
    seconds: float
    deviation: float


def auto_plan(
    flow: Flow, n: int, *, bound: float, context: Tensor | None, guidance: Guidance, backend: Backend | None
) -> Plan:
    """The fastest plan for n samples at once. It never starts a measurement that takes seconds."""
    entry = entry_of(flow, guidance)
    if entry is None or n == 0:
        return default_plan(flow)
    batch = min(1 << round(math.log2(n)), LARGEST_BATCH)  # a power of two near n
    key = (batch, guidance, bound, backend, torch.get_num_threads(), entry.noises, flow.fingerprint())
    if key not in flow.auto_plans:
        rows = choices(flow, batch, entry, guidance=guidance, context=context, backend=backend)
        flow.auto_plans[key] = pick(rows, MARGIN * bound)
    return flow.auto_plans[key]


def default_plan(flow: Flow) -> Plan:
    """The plan without a profile: sequential on a CPU; near-exact on an accelerator, where launches bound that."""
    blocks, device = len(flow.blocks), next(flow.parameters()).device
    if device.type == "cpu":
        return Plan.sequential(blocks)
    scale = flow.default_deviation / 0.05
    whole = Method(tol=0.01 * scale, max_sweeps=max(flow.sequence_shape[0] // 8, 1))
    return Plan((Method(width=64, tol=1e-4 * scale), *[whole] * (blocks - 1)))


def deviation_bound(flow: Flow, max_deviation: float | None) -> float:
    """The deviation that a plan may cost; None is the family's default."""
    with suppress(ValueError):
        bound = flow.default_deviation if max_deviation is None else number("max_deviation", max_deviation)
        if bound > 0:
            return bound
    raise ValueError(f"max_deviation must be positive, not {short(max_deviation)}: 'sequential' is the exact plan")


def entry_of(flow: Flow, guidance: Guidance) -> Entry | None:
    """The entry for this guidance of the flow's profile, or of one that `tune` kept in the cache folder."""
    if flow.current(flow.profile, "convergence profile") is None:
        recall(flow)
    profile = flow.current(flow.profile, "convergence profile")
    found = None if profile is None else profile.entry(guidance)
    return found if found is not None and len(found.blocks) == len(flow.blocks) else None


def keep(flow: Flow) -> Path | None:
    """Keep profile and first guesses of a flow in the cache folder; where, or None if it is not usable."""
    folder = own_folder(f"profiles/{flow.fingerprint()}")
    for measured in (flow.profile, flow.calibration):
        if folder is not None and measured is not None:
            measured.save(folder)
    return folder


def recall(flow: Flow) -> None:
    """Give a flow the profile and the first guesses that `keep` kept for its weights."""
    name = f"profiles/{flow.fingerprint()}"
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        if (cache_folder() / name).is_dir() and (folder := own_folder(name)) is not None:
            flow.profile = Profile.load(folder)
            flow.calibration = Calibration.load(folder, (len(flow.blocks), *flow.sequence_shape))


def choices(
    flow: Flow,
    n: int,
    entry: Entry,
    *,
    guidance: Guidance,
    context: Tensor | None = None,
    backend: Backend | None = None,
    clock: Clock = perf_counter,
) -> list[list[Choice]]:
    """Per block the methods of the profile with their predicted seconds, and sequential decoding last."""
    labels = flow.every_label(n)
    context = None if context is None else context.reshape(-1, context.shape[-1])[:1].expand(n, -1)
    z, found = flow.to_prior(flow.noise(n, 0)), []
    with torch.no_grad(), torch_single_threaded(z):
        stack = flow.bound_blocks(n, labels=labels, context=context, guidance=guidance, backend=backend)
        for block, cells in zip(stack, entry.blocks, strict=True):
            costs = costs_of(block, z, clock=clock)
            exact = Choice(Method(width=1, unit=flow.default_unit), costs.sequential(n), 0.0)
            known = [c for c in cells if c.init != "calibrated" or block.guess is not None]
            usable = (c for c in known if c.precision == "float32" or costs.rough)
            seconds = ((c, costs.swept(c.width, c.sweeps, n, c.guess_sweeps)) for c in usable)
            swept = (Choice(c.method, took, c.deviation) for c, took in seconds if took < exact.seconds)
            found.append([*swept, exact])
    return found


def pick(rows: Sequence[Sequence[Choice]], bound: float) -> Plan:
    """The fastest plan whose deviations sum to at most `bound`, by dynamic programming over the blocks.

    Every row ends with exact sequential decoding, which stays unless the plan gains enough.
    """
    best: list[tuple[float, tuple[Method, ...]]] = [(0.0, ())] * (LEVELS + 1)  # by deviation spent so far
    for row in rows:
        steps = [(c, math.ceil(c.deviation / bound * LEVELS)) for c in row if c.deviation <= bound]
        before, best = best, []
        for level in range(LEVELS + 1):
            found = [(before[level - cost], c) for c, cost in steps if cost <= level]
            (seconds, methods), last = min(found, key=lambda pair: pair[0][0] + pair[1].seconds)
            best.append((seconds + last.seconds, (*methods, last.method)))
    seconds, methods = best[LEVELS]
    exact = sum(row[-1].seconds for row in rows)
    return Plan(methods if seconds <= GAIN * exact else tuple(row[-1].method for row in rows))
