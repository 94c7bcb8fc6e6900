"""Times by the paper's rule: a run is the mean of several distinct batches, and there are several runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.core.types import Status
from jacobiflow.flows.compare import Row, compare
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.plain_loop import plain_tarflow
from jacobiflow.flows.tarflow import TarFlow
from jacobiflow_lab.paper.workshop import Context

EXACT = "sequential"
PLAIN = "plain loop"


def timed(
    context: Context, plans: Mapping[str, Plan], batch: int, *, runs: int, repeats: int, plain: bool = False
) -> list[dict[str, Any]]:
    """For every plan: seconds a batch, the largest deviation of a run from that mean, and from exact.

    Every batch is other noise; plans take turns on it. plain: the loop of public code takes its turns too; it
    is the first row, and every row has its speed-up against it.
    """
    flow, seed = context.flow, context.seed
    folder = context.folder / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: str(folder / f"{context.model}-{file_name(name)}.json") for name in plans}
    paths |= {EXACT: EXACT}
    for name, plan in plans.items():
        if name != EXACT:
            plan.save(paths[name])
    labels = context.labels(batch)

    def condition(count: int) -> dict[str, Any]:
        return {} if labels is None else {"labels": labels[:count]}

    found: dict[str, list[list[Row]]] = {name: [[] for _ in range(runs)] for name in paths}
    loops: list[list[dict[str, float]]] = [[] for _ in range(runs)]
    for run in range(runs):
        for i in range(repeats):
            start = (run * repeats + i) * batch
            z = flow.noise(batch, seed, start=start)
            rows, outs = compare(flow, z, list(paths.values()), [batch], repeats=1, condition=condition)
            by_path = {row.plan: row for row in rows}
            if plain:
                loops[run].append(loop(flow, z, labels, outs[EXACT].x))
            for name, path in paths.items():
                found[name][run].append(by_path[path])
    exact = statistics.fmean(row.seconds for run in found[EXACT] for row in run)
    summaries = [_summary(name, batch, found[name], exact) for name in plans]
    if not plain:
        return summaries
    base = _speed(PLAIN, batch, [[row["seconds"] for row in run] for run in loops], exact)
    off = [row for run in loops for row in run]
    base |= {
        "largest": max(row["largest"] for row in off),
        "mean": statistics.fmean(row["mean"] for row in off),
    }
    return [row | {"against_plain": base["seconds"] / row["seconds"]} for row in (base, *summaries)]


def file_name(method: str) -> str:
    """A method's name without spaces and commas."""
    return "-".join(method.replace(",", " ").split())


def rest(context: Context, batch: int, *, runs: int, repeats: int) -> list[float]:
    """Seconds a batch that no decoder changes, a mean for each run: drawing the noise, and denoising."""
    flow, labels, means = context.flow, context.labels(batch), []
    context.workshop.clean(context.model, flow.from_sequence(flow.noise(batch, context.seed)), labels)
    for run in range(runs):
        found = []
        for i in range(repeats):
            began = time.perf_counter()
            z = flow.noise(batch, context.seed, start=(run * repeats + i) * batch)
            x = flow.from_sequence(z)  # of the shape of a sample; denoising takes no longer for a good one
            context.workshop.clean(context.model, x, labels)
            if x.is_cuda:
                torch.cuda.synchronize(x.device)
            found.append(time.perf_counter() - began)
        means.append(statistics.fmean(found))
    return means


def loop(flow: Flow, z: Tensor, labels: Tensor | None, exact: Tensor) -> dict[str, float]:
    """Seconds of the plain loop, and how far it is from our sequential decoding of the same noise."""
    assert isinstance(flow, TarFlow)
    began = time.perf_counter()
    x = plain_tarflow(flow, z, labels)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    seconds = time.perf_counter() - began
    off = (x - exact).abs().double()
    off = off[off.isfinite()]
    return {"seconds": seconds, "largest": off.max().item(), "mean": off.mean().item()}


def _summary(name: str, batch: int, runs: list[list[Row]], exact: float) -> dict[str, Any]:
    rows = [row for run in runs for row in run]
    return _speed(name, batch, [[row.seconds for row in run] for run in runs], exact) | {
        "sweeps": [statistics.fmean(s) for s in zip(*(row.sweeps for row in rows), strict=True)],
        "largest": max(row.largest for row in rows),
        "mean": statistics.fmean(row.mean for row in rows),
        "status": max((Status[row.status] for row in rows), key=lambda s: s.rank).name,
    }


def _speed(name: str, batch: int, runs: list[list[float]], exact: float) -> dict[str, Any]:
    means = [statistics.fmean(run) for run in runs]
    seconds = statistics.fmean(means)
    return {
        "method": name,
        "batch": batch,
        "seconds": seconds,
        "runs": means,
        "spread": max(abs(mean - seconds) for mean in means),
        "speedup": exact / seconds,
    }
