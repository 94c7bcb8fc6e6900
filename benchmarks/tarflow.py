"""TarFlow against the plain sequential loop: batch sizes, sequence lengths."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks.harness import Row, floor, one_sweep, race
from jacobiflow.flows.compare import plain_tarflow


def race_at(flow: jf.Flow, n: int, repeats: int, *, tuned: bool) -> list[Row]:
    """The plain loop and our plans at one batch size."""
    z, labels = flow.noise(n, seed=0), torch.arange(n) % 10
    plans: dict[str, str | jf.Plan] = {"sequential": "sequential", "selective, tol 0.5": "selective"}
    if tuned:
        plans["auto"] = flow.plan("auto", n=n)
    exact = flow.decode(z, "sequential", labels=labels).x
    runs: dict[str, Callable[[], Tensor]] = {"plain loop": lambda: plain_tarflow(flow, z, labels)}
    for name, plan in plans.items():
        runs[name] = lambda plan=plan: flow.decode(z, plan, labels=labels).x
    sweep = one_sweep(flow, z, labels=labels)
    floors = {"sequential": floor(flow, n), "selective, tol 0.5": sweep, "auto": sweep}
    return race("plain loop", runs, exact, repeats, floors, batch=n)


def table(repeats: int) -> list[Row]:
    """The batches of the goals."""
    flow = jf.load("mnist")
    return [row for n in (1, 16, 64) for row in race_at(flow, n, repeats, tuned=True)]


def guided(repeats: int) -> list[Row]:
    """Sequential decoding with guidance against without: both branches are rows of one batch."""
    flow, rows = jf.load("mnist"), list[Row]()
    for n in (1, 16, 64):
        z, labels = flow.noise(n, seed=0), torch.arange(n) % 10
        runs: dict[str, Callable[[], Tensor]] = {
            name: lambda z=z, labels=labels, w=w: flow.decode(z, "sequential", labels=labels, guidance=w).x
            for name, w in (("unguided", 0.0), ("guided", 1.0))
        }
        rows += race("unguided", runs, runs["guided"](), repeats, batch=n)
    return rows


def batches(repeats: int) -> list[Row]:
    """Time against batch; auto's stands in the section `auto`."""
    flow = jf.load("mnist-small")
    sizes = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    return [row for n in sizes for row in race_at(flow, n, repeats, tuned=False)]


def lengths(repeats: int) -> list[Row]:
    """Weights with noise on them, two blocks of two layers of width 128: how the cost grows with T."""
    rows: list[Row] = []
    for size in (28, 56, 112):
        torch.manual_seed(0)
        flow = jf.TarFlow(
            jf.TarFlowConfig(image_size=size, image_channels=1, patch_size=4, width=128, blocks=2, layers_per_block=2)
        )
        with torch.no_grad():
            for name, p in flow.named_parameters():
                if p.ndim == 2 and "embed" not in name:
                    p += 0.2 / p.shape[1] ** 0.5 * torch.randn(p.shape)
        z = flow.noise(4, seed=0)
        exact = flow.decode(z, "sequential").x
        sweep = jf.Plan((jf.Method(max_sweeps=1),) * 2)
        runs = {
            "plain loop": lambda flow=flow, z=z: plain_tarflow(flow, z),
            "sequential": lambda flow=flow, z=z: flow.decode(z, "sequential").x,
            "uniform, tol 1e-3": lambda flow=flow, z=z: flow.decode(z, "uniform", tol=1e-3).x,
            "one sweep a block": lambda flow=flow, z=z, p=sweep: flow.decode(z, p, on_failure="return", warn=False).x,
        }
        limit = floor(flow, 4)
        rows += race("plain loop", runs, exact, repeats, dict.fromkeys(runs, limit), length=flow.config.length)
    return rows
