"""How many sweeps each block takes, of a flow and of the checkpoints that a training run kept."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.method import Init, Plan
from jacobiflow.core.results import JacobiflowError
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.exact_blocks import Note, Record, select_rows


@dataclass(frozen=True, kw_only=True)
class BlockSweeps:
    """One block; sequential decoding counts T - 1, because the first position is given."""

    width: int | None  # of its windows; 1 is sequential, None the whole sequence
    mean: float  # over samples
    error: float  # its standard error; 0 for one sample
    batch_max: float  # of the slowest sample of a batch, mean over batches
    largest: int
    bound: int  # T - 1: the most that sweeps over the whole sequence can take


@dataclass(frozen=True, kw_only=True)
class Sweeps(Record):
    """The blocks (`layers` in the JSON), the one next to the noise first."""

    plan: str
    tol: float | None  # of the swept blocks, if they share one
    init: Init | None
    samples: int
    batch: int
    layers: tuple[BlockSweeps, ...]


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A checkpoint of a run."""

    step: int
    sweeps: Sweeps


@dataclass(frozen=True, kw_only=True)
class Progress(Record):
    """The checkpoints of a run, the earliest first."""

    moments: tuple[Moment, ...]


def sweeps(
    flow: Flow,
    z: Tensor,
    plan: str | Plan = "selective",
    *,
    tol: float | None = None,
    init: Init | None = None,
    batch: int | None = None,
    **condition: Any,
) -> Sweeps:
    """Sweeps of each block over all samples, decoded `batch` at a time. Default: all at once.

    tol, init: of named plans, as `Flow.decode` takes them. condition: labels, context, guidance.
    """
    size = batch or len(z)
    chosen = flow.plan(plan, tol=tol, init=init, n=size)
    counts = []  # per batch: [blocks, n]
    for i in range(0, len(z), size):
        rows = slice(i, i + size)
        out = flow.decode(z[rows], chosen, **select_rows(condition, rows, len(z)))
        counts.append(torch.stack([b.sweeps for b in out.stats.blocks]).double())
    every = torch.cat(counts, 1)
    slowest = torch.stack([c.amax(1) for c in counts], 1).mean(1)
    length = flow.to_prior(z[:1]).shape[1]
    layers = [
        BlockSweeps(
            width=method.width,
            mean=float(own.mean()),
            error=float(own.std() / len(own) ** 0.5) if len(own) > 1 else 0.0,
            batch_max=float(most),
            largest=int(own.max()),
            bound=length - 1,
        )
        for method, own, most in zip(chosen, every, slowest, strict=True)
    ]
    swept = {(m.tol, m.init) for m in chosen if m.width != 1}
    shared_tol, shared_init = swept.pop() if len(swept) == 1 else (None, None)
    return Sweeps(
        plan=plan if isinstance(plan, str) else "plan",
        tol=shared_tol,
        init=shared_init,
        samples=len(z),
        batch=size,
        layers=tuple(layers),
    )


def kept(folder: str | Path) -> list[tuple[int, Path]]:
    """Steps and checkpoints kept/step-* of a training run's folder, the earliest first."""
    root = Path(folder) if Path(folder).name == "kept" else Path(folder, "kept")
    names = ((re.fullmatch(r"step-(\d+)", path.name), path) for path in root.glob("step-*"))
    return sorted((int(name[1]), path) for name, path in names if name)


def progress(
    folder: str | Path,
    *,
    n: int = 16,
    seed: int = 0,
    labels: Callable[[int], Tensor | None] = lambda classes: None,
    device: torch.device | str = "cpu",
    say: Note = lambda text: None,
    **options: Any,
) -> Progress:
    """Sweeps of every block, all swept ("uniform"), of each kept checkpoint, from the same noise.

    labels: from the flow's number of classes to the labels of the n samples. options: those of `sweeps`.
    """
    moments = []
    for step, path in kept(folder):
        say(f"step {step}")
        flow = load(path, device=device)
        options["labels"] = labels(flow.num_classes)
        moments.append(Moment(step=step, sweeps=sweeps(flow, flow.noise(n, seed), "uniform", **options)))
    if not moments:
        raise JacobiflowError(f"{folder} keeps no checkpoints kept/step-*: train with training.keep_every > 0")
    return Progress(moments=tuple(moments))
