"""Times by the paper's rule: a run is the mean of several distinct batches, and there are several runs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from jacobiflow.analysis.compare import Row, compare
from jacobiflow.core.plan import Plan
from jacobiflow.core.types import Status
from jacobiflow.paper.workshop import Context

EXACT = "sequential"


def timed(
    context: Context, plans: Mapping[str, Plan], batch: int, *, runs: int, repeats: int
) -> list[dict[str, Any]]:
    """For every plan: seconds a batch, the largest deviation of a run from that mean, and from exact.

    Every batch is other noise; plans take turns on it.
    """
    flow, seed = context.flow, context.seed
    folder = context.folder / "plans"
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: str(folder / f"{context.model}-{name}.json") for name in plans} | {EXACT: EXACT}
    for name, plan in plans.items():
        if name != EXACT:
            plan.save(paths[name])
    labels = context.labels(batch)

    def condition(count: int) -> dict[str, Any]:
        return {} if labels is None else {"labels": labels[:count]}

    found: dict[str, list[list[Row]]] = {name: [[] for _ in range(runs)] for name in paths}
    for run in range(runs):
        for i in range(repeats):
            start = (run * repeats + i) * batch
            z = flow.noise(batch, seed, start=start)
            rows, _ = compare(flow, z, list(paths.values()), [batch], repeats=1, condition=condition)
            by_path = {row.plan: row for row in rows}
            for name, path in paths.items():
                found[name][run].append(by_path[path])
    exact = statistics.fmean(row.seconds for run in found[EXACT] for row in run)
    return [_summary(name, batch, found[name], exact) for name in plans]


def _summary(name: str, batch: int, runs: list[list[Row]], exact: float) -> dict[str, Any]:
    rows = [row for run in runs for row in run]
    means = [statistics.fmean(row.seconds for row in run) for run in runs]
    seconds = statistics.fmean(means)
    return {
        "method": name,
        "batch": batch,
        "seconds": seconds,
        "runs": means,
        "spread": max(abs(mean - seconds) for mean in means),
        "speedup": exact / seconds,
        "sweeps": [statistics.fmean(s) for s in zip(*(row.sweeps for row in rows), strict=True)],
        "largest": max(row.largest for row in rows),
        "mean": statistics.fmean(row.mean for row in rows),
        "status": max((Status[row.status] for row in rows), key=lambda s: s.rank).name,
    }
