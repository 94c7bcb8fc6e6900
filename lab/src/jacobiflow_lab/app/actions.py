"""What the buttons of the Sample and Plans tabs do. Values come in, results come out; no page is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.method import Plan
from jacobiflow.core.results import Decoded
from jacobiflow.flows.compare import MOST_RUNS, PLAIN, Row, compare, has_plain_loop
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.plans import SWEPT
from jacobiflow.flows.tune import tune
from jacobiflow.jobs.sampling import labels_in_turn
from jacobiflow_lab.analysis.convergence import Convergence, convergence
from jacobiflow_lab.analysis.trajectory import Walk, finish, walk
from jacobiflow_lab.app import models as asked
from jacobiflow_lab.app.models import ModelRegistry, max_samples, whole
from jacobiflow_lab.app.visitors import Monitor

STEPPED_SAMPLES = 10  # samples that are shown while stepping through a block


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """The same noise decoded sequentially and by a plan, and what stepping through a block needs."""

    model: str
    seed: int
    labels: list[int]
    plan: Plan
    plain: Row | None  # the plain loop; None for flows that it does not know, and with guidance
    rows: tuple[Row, Row]  # sequential and the chosen plan
    exact: Tensor
    decoded: Decoded  # by the chosen plan
    denoised: bool  # whether noise was removed from the samples after the comparison
    convergence: Convergence
    stepped: Tensor  # noise of the first few samples
    condition: dict[str, Any]  # their labels and guidance


def sample(
    models: ModelRegistry,
    *,
    model: object,
    labels: object,
    count: object,
    seed: object,
    plan: object,
    tol: object,
    init: object,
    guidance: object,
    runs: object = MOST_RUNS,
    denoise: object = False,
    monitor: Monitor = Monitor(),  # noqa: B008
) -> SampleResult:
    """Decode the same noise by the plain loop, sequentially and by a plan, until speed-ups are stable."""
    flow = models[model]
    n, start = whole(count, "Count", 1, max_samples(flow)), whole(seed, "Seed", 0, asked.MAX_SEED)
    repeats = whole(runs, "Timed runs", 1, asked.MAX_RUNS)
    name, options = asked.chosen_plan(plan, tol, init)
    cycle = asked.chosen_labels(labels, flow)
    guide = asked.chosen_guidance(guidance, flow, labelled=bool(cycle))
    plans = [*[PLAIN] * has_plain_loop(flow, guide), *dict.fromkeys(["sequential", name])]
    begin = monitor.steps(repeats * len(plans) + 2)

    def condition(n: int) -> dict[str, Any]:
        return {"guidance": guide, "labels": labels_in_turn(cycle, range(n))}

    with models.lock:
        used = flow.plan(name, n=n, guidance=guide, **options)
        z = flow.noise(n, start)
        rows, outs = compare(
            flow,
            z,
            plans,
            [n],
            repeats=repeats,
            options=lambda p: options if p in SWEPT else {},
            condition=condition,
            progress=lambda text: begin(f"decoding {text}"),
        )
        exact, decoded = outs["sequential"].x, outs[name]
        denoised = bool(denoise) and flow.noise_std > 0
        if denoised:
            exact, x = (flow.denoise(x, labels_in_turn(cycle, range(n))) for x in (exact, decoded.x))
            decoded = replace(decoded, x=x)
        stepped = z[:STEPPED_SAMPLES]
        begin("measuring the convergence of each block")
        curves = convergence(flow, stepped, **condition(len(stepped)))
    return SampleResult(
        model=str(model),
        seed=start,
        labels=cycle,
        plan=used,
        plain=rows[0] if plans[0] == PLAIN else None,
        rows=(rows[plans.index("sequential")], rows[-1]),
        exact=exact,
        decoded=decoded,
        denoised=denoised,
        convergence=curves,
        stepped=stepped,
        condition=condition(len(stepped)),
    )


def block_steps(models: ModelRegistry, result: SampleResult, block: object) -> Walk:
    """How the first few samples go through one block, counted from 1."""
    flow = models[result.model]
    k = whole(block, "Block", 1, len(flow.blocks)) - 1
    with models.lock:
        return walk(flow, result.stepped, k, result.plan, **result.condition)


def samples_after(
    models: ModelRegistry, result: SampleResult, steps: Walk, sweeps: object, positions: object
) -> tuple[Tensor, Tensor]:
    """Samples if the block stopped after so many sweeps, and after so many single positions."""
    s = whole(sweeps, "Sweeps", 0, len(steps.swept) - 1)
    p = whole(positions, "Positions", 0, steps.length - 1)
    both = torch.cat([steps.swept[s], steps.after_positions(p)])
    labels = result.condition["labels"]
    condition = result.condition | {"labels": None if labels is None else labels.repeat(2)}
    with models.lock:
        swept, sequential = finish(models[result.model], both, steps.block, **condition).chunk(2)
    return swept, sequential


@dataclass(frozen=True, kw_only=True)
class PlanResult:
    """The plan that "auto" uses, or the one that was tuned just now: its `about` says what was measured."""

    model: str
    batch: int
    guidance: Guidance
    plan: Plan


def machine_plan(
    models: ModelRegistry,
    *,
    model: object,
    batch: object,
    labelled: object,
    guidance: object,
    measure: bool,
    monitor: Monitor = Monitor(),  # noqa: B008
) -> PlanResult:
    """The plan that "auto" uses on this machine. With `measure`, plans are timed and the fastest is shown."""
    flow = models[model]
    n = whole(batch, "Batch size", 1, max_samples(flow))
    guide = asked.chosen_guidance(guidance, flow, labelled=bool(labelled))
    labels = torch.arange(flow.num_classes) if labelled and flow.num_classes else None
    begin = monitor.steps(2 * len(flow.blocks) + 10)

    def progress(text: str) -> None:
        begin(f"measuring {text}")

    with models.lock:
        if measure:
            options: dict[str, Any] = {"clock": monitor.clock(flow), "progress": progress}
            plan = tune(flow, n, labels=labels, guidance=guide, **options)
        else:
            plan = flow.plan("auto", n=n, guidance=guide)
    return PlanResult(model=str(model), batch=n, guidance=guide, plan=plan)
