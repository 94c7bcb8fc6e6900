"""What the buttons do. Nothing here knows of pages: values come in, records come out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.core.tune import Clock
from jacobiflow.flows.compare import Row, compare
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.stored_plans import Setting, find
from jacobiflow.flows.tuning import ROWS, auto_setting, clock_of, keep, tune
from jacobiflow_lab.analysis.convergence import Approach, convergence
from jacobiflow_lab.analysis.walk import Walk, finish, walk
from jacobiflow_lab.app.models import (
    LARGEST_GUIDANCE,
    LARGEST_SEED,
    LARGEST_TOL,
    RUNS,
    Refused,
    Shelf,
    chosen_init,
    chosen_labels,
    chosen_plan,
    in_turn,
    most,
    number,
    whole,
)

SWEPT = ("uniform", "selective")  # the plans that take a tolerance and a first guess
FEW = 10  # samples whose way is shown

Progress = Callable[[float, str], None]  # share done, and what is being done; may raise to end the work
Check = Callable[[], None]  # called often, between measurements; may raise to end the work


def silent(share: float, text: str) -> None:
    """Progress for nobody."""


def unchecked() -> None:
    """A check for work that is always finished."""


def checked_clock(flow: Flow, check: Check) -> Clock:
    """The clock that tuning reads before and after each measurement, with a check of its own."""
    seconds = clock_of(next(flow.parameters()).device)

    def read() -> float:
        check()
        return seconds()

    return read


@dataclass(frozen=True, kw_only=True)
class Sampled:
    """One press of Sample: everything that is shown, and what walking through a block needs."""

    model: str
    labels: list[int]
    plan: Plan
    rows: tuple[Row, Row]  # sequential and the chosen plan
    exact: Tensor
    x: Tensor
    seconds: tuple[float, ...]  # of the chosen plan's blocks
    convergence: tuple[Approach, ...]
    length: int  # positions of a sequence
    few: Tensor  # noise of the samples that walks are about
    condition: dict[str, Any]  # theirs


def sample(
    shelf: Shelf,
    *,
    model: object,
    labels: object,
    count: object,
    seed: object,
    plan: object,
    tol: object,
    init: object,
    guidance: object,
    runs: object = 1,
    progress: Progress = silent,
    check: Check = unchecked,
) -> Sampled:
    """The same noise by sequential decoding and by a plan."""
    flow = shelf[model]
    n = whole(count, "Count", 1, most(flow))
    start = whole(seed, "Seed", 0, LARGEST_SEED)
    repeats = whole(runs, "Runs", 1, RUNS)
    name, cycle = chosen_plan(plan), chosen_labels(labels, flow)
    given: dict[str, Any] = {}
    if name in SWEPT:
        given = {"tol": number(tol, "Tolerance", 0.0, LARGEST_TOL), "init": chosen_init(init)}
    guide = chosen_guidance(guidance, flow)
    names = [name] if name == "sequential" else ["sequential", name]
    steps, done = repeats * len(names) + 2, 0

    def told(text: str) -> None:
        nonlocal done
        progress(done / steps, text)
        done += 1

    with shelf.work:
        watched: dict[str, Any] = {}
        if name == "auto":  # tunes now if there is no plan yet
            watched = {
                "clock": checked_clock(flow, check),
                "progress": lambda text: progress(0.0, f"tuning: {text}"),
            }
        used = flow.plan(name, n=n, **given, **auto_condition(name, cycle, guide, n), **watched)
        z = flow.noise(n, start)
        rows, outs = compare(
            flow,
            z,
            ["sequential", name],
            [n],
            repeats=repeats,
            options=lambda p: {"guidance": guide} | (given if p in SWEPT else {}),
            condition=lambda batch: labelled(cycle, batch),
            progress=lambda text: told(f"decoding {text}"),
        )
        few = z[:FEW]
        condition = {"guidance": guide} | labelled(cycle, len(few))
        told("convergence of each block")
        approach = convergence(flow, few, **condition).blocks
    out = outs[name]
    return Sampled(
        model=str(model),
        labels=cycle,
        plan=used,
        rows=(rows[0], rows[-1]),
        exact=outs["sequential"].x,
        x=out.x,
        seconds=tuple(b.seconds for b in out.stats.blocks),
        convergence=approach,
        length=flow.to_prior(few).shape[1],
        few=few,
        condition=condition,
    )


def labelled(cycle: list[int], n: int) -> dict[str, Any]:
    """The labels of n samples, for decoders."""
    return {"labels": in_turn(cycle, n)} if cycle else {}


def auto_condition(plan: str, cycle: list[int], guide: Guidance, n: int) -> dict[str, Any]:
    """What plan "auto" is made for; other plans take none of it."""
    return {"guidance": guide} | labelled(cycle, n) if plan == "auto" else {}


def chosen_guidance(value: object, flow: Flow) -> Guidance:
    """Guidance; models without labels have none, whatever the field says."""
    if not flow.num_classes:
        return Guidance()
    return Guidance(weight=number(value, "Guidance", 0.0, LARGEST_GUIDANCE))


# Walking


def begin_walk(shelf: Shelf, sampled: Sampled | None, block: object) -> Walk:
    """The way of a few of the samples through one block, counted from 1."""
    if sampled is None:
        raise Refused("press Sample first: there is nothing to walk through yet")
    flow = shelf[sampled.model]
    k = whole(block, "Block", 1, len(flow.blocks)) - 1
    with shelf.work:
        return walk(flow, sampled.few, k, sampled.plan, **sampled.condition)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One moment of both ways, as data."""

    sweeps: int
    positions: int
    swept: Tensor
    sequential: Tensor


def frame(shelf: Shelf, sampled: Sampled, way: Walk, sweeps: object, positions: object) -> Frame:
    """What the flow makes of the block after so many sweeps, and after so many single positions."""
    flow = shelf[sampled.model]
    s = whole(sweeps, "Sweeps", 0, len(way.swept) - 1)
    p = whole(positions, "Positions", 0, way.length - 1)
    both = torch.cat([way.after_sweeps(s), way.after_positions(p)])
    condition = dict(sampled.condition)
    if "labels" in condition:
        condition["labels"] = condition["labels"].repeat(2)
    with shelf.work:
        swept, sequential = finish(flow, both, way.block, **condition).chunk(2)
    return Frame(sweeps=s, positions=p, swept=swept, sequential=sequential)


# Plans of this machine


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """What is known here about a batch size: the setting, and the plan if one was made."""

    model: str
    setting: Setting
    plan: Plan | None


def stored_plan(shelf: Shelf, *, model: object, batch: object, labelled: object, guidance: object) -> Tuned:
    """The plan that "auto" would use on this machine, if it has been made."""
    flow = shelf[model]
    setting = _setting(flow, batch, labelled, guidance)
    with shelf.work:
        plan = find(setting, len(flow.blocks))
    return Tuned(model=str(model), setting=setting, plan=plan)


def make_plan(
    shelf: Shelf,
    *,
    model: object,
    batch: object,
    labelled: object,
    guidance: object,
    progress: Progress = silent,
    check: Check = unchecked,
) -> Tuned:
    """Measure again, and keep what was found for plan "auto"."""
    flow = shelf[model]
    setting = _setting(flow, batch, labelled, guidance)
    steps, done = len(flow.blocks) + 5, 0  # each block, and what comes before and after them

    def told(text: str) -> None:
        nonlocal done
        progress(done / steps, f"measuring {text}")
        done += 1

    with shelf.work:
        plan = tune(
            flow,
            setting.batch,
            setting.max_deviation,
            labels=torch.arange(flow.num_classes) if setting.labels else None,
            guidance=setting.guidance,
            rows=ROWS,
            clock=checked_clock(flow, check),
            progress=told,
        )
        keep(plan, setting)
    return Tuned(model=str(model), setting=setting, plan=plan)


def _setting(flow: Flow, batch: object, labelled: object, guidance: object) -> Setting:
    n = whole(batch, "Batch", 1, most(flow))
    with_labels = bool(labelled) and flow.num_classes > 0
    return auto_setting(flow, n, with_labels, chosen_guidance(guidance, flow))
