"""Timing by the paper's rule: a run is the mean of several distinct batches, and there are several runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from jacobiflow.core.method import Method, Plan
from jacobiflow.core.results import Decoded
from jacobiflow.flows.plain_loop import plain_tarflow
from jacobiflow.flows.tarflow import TarFlow
from jacobiflow_lab.paper.sampling import denoise
from jacobiflow_lab.paper.session import Task

T = TypeVar("T")
EXACT = "sequential"
PLAIN = "plain loop"


def clock(device: torch.device, work: Callable[..., T], *args: Any) -> tuple[float, T]:
    """Seconds that work(*args) takes, and what it returns."""
    began = time.perf_counter()
    out = work(*args)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began, out


def deviation(x: Tensor, exact: Tensor) -> dict[str, float]:
    """The largest and mean distance of samples from sequential decoding, over finite numbers."""
    off = (x - exact).abs().double()
    off = off[off.isfinite()]
    return {"largest": off.max().item() if len(off) else float("nan"), "mean": off.mean().item()}


def timed(
    task: Task, plans: Mapping[str, Plan], batch: int, *, runs: int, repeats: int, plain: bool = False
) -> list[dict[str, Any]]:
    """For every plan: seconds per batch with their spread over runs, and the deviation from sequential.

    Every batch has new noise, which all plans decode in turn. plain: the loop of public code decodes it too.
    It is the first row, and every row has its speed-up over it.
    """
    flow, labels = task.flow, task.labels(batch)
    every = {EXACT: flow.plan(EXACT)} | dict(plans)
    one_sweep = Plan((Method(max_sweeps=1),) * len(flow.blocks))  # pays for what is made at first use
    seen: dict[str, list[list[dict[str, Any]]]] = {
        name: [[] for _ in range(runs)] for name in (*every, PLAIN)
    }
    for run in range(runs):
        for i in range(repeats):
            z = flow.noise(batch, task.seed, start=(run * repeats + i) * batch)
            flow.decode(z[:1], one_sweep, **task.condition(1), on_failure="return", warn=False)
            outs = {name: flow.decode(z, plan, labels=labels, warn=False) for name, plan in every.items()}
            exact = outs[EXACT].x
            for name, out in outs.items():
                seen[name][run].append(_decoding(out, exact))
            if plain:
                assert isinstance(flow, TarFlow)
                seconds, x = clock(task.device, plain_tarflow, flow, z, labels)
                seen[PLAIN][run].append({"seconds": seconds} | deviation(x, exact))
    base = statistics.fmean(each["seconds"] for run in seen[EXACT] for each in run)
    rows = [_summary(name, batch, seen[name], base) for name in ((PLAIN,) if plain else ()) + tuple(plans)]
    if plain:
        rows = [row | {"against_plain": rows[0]["seconds"] / row["seconds"]} for row in rows]
    return rows


def other_seconds(task: Task, batch: int, *, runs: int, repeats: int) -> list[float]:
    """Seconds per batch that no decoder changes, noise and denoising: the mean of each run."""
    flow, labels = task.flow, task.labels(batch)

    def around(start: int) -> Tensor:
        # Denoising takes as long for noise as for a sample.
        return denoise(task, flow.from_sequence(flow.noise(batch, task.seed, start=start)), labels)

    around(0)
    starts = [[(run * repeats + i) * batch for i in range(repeats)] for run in range(runs)]
    return [statistics.fmean(clock(task.device, around, start)[0] for start in run) for run in starts]


def _decoding(out: Decoded, exact: Tensor) -> dict[str, Any]:
    """One batch by one plan."""
    return {
        "seconds": out.stats.seconds,
        "sweeps": [block.sweeps.double().mean().item() for block in out.stats.blocks],
        "status": out.stats.status,
    } | deviation(out.x, exact)


def _summary(name: str, batch: int, runs: list[list[dict[str, Any]]], base: float) -> dict[str, Any]:
    """The row of a method over all runs. base: seconds of sequential decoding."""
    means = [statistics.fmean(each["seconds"] for each in run) for run in runs]
    seconds = statistics.fmean(means)
    every = [each for run in runs for each in run]
    row = {
        "method": name,
        "batch": batch,
        "seconds": seconds,
        "runs": means,
        "spread": max(abs(mean - seconds) for mean in means),
        "speedup": base / seconds,
        "largest": max(each["largest"] for each in every),
        "mean": statistics.fmean(each["mean"] for each in every),
    }
    if "sweeps" in every[0]:
        row["sweeps"] = [statistics.fmean(s) for s in zip(*(each["sweeps"] for each in every), strict=True)]
        row["status"] = max((each["status"] for each in every), key=lambda status: status.rank).name
    return row
