"""Where the seconds of sampling go: each block, and the rest."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from jacobiflow.core.method import Plan
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.exact_blocks import Note, Record, select_rows


@dataclass(frozen=True, kw_only=True)
class BlockTime:
    """One block's seconds and its mean number of sweeps."""

    seconds: float
    sweeps: float


@dataclass(frozen=True, kw_only=True)
class Runtime(Record):
    """One plan: medians over the runs, seconds per batch; blocks (`layers` in the JSON) in sampling order."""

    plan: str
    batch: int
    repeats: int
    threads: int
    device: str
    layers: tuple[BlockTime, ...]
    noise: float
    denoising: float
    communication: float  # gathering the samples of all processes; about 0 on one
    gathered: int  # samples that every process has in the end: its own batch and those of the others
    rest: float  # between the blocks: permutations, the prior, patches
    total: float

    @property
    def other(self) -> float:
        """All that is not a block."""
        return self.noise + self.denoising + self.communication + self.rest

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the total: each block, then what is not a block."""
        parts = [*(layer.seconds for layer in self.layers), self.other]
        return tuple(seconds / sum(parts) for seconds in parts)

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON, with `other` and the shares."""
        return super().to_dict() | {"other": self.other, "shares": list(self.shares)}


def runtime(
    flow: Flow,
    n: int,
    plan: str | Plan = "selective",
    *,
    repeats: int = 3,
    seed: int = 0,
    denoise: bool | None = None,
    options: dict[str, Any] | None = None,
    progress: Note = lambda text: None,
    **condition: Any,
) -> Runtime:
    """Sample a batch of n `repeats` times, after a first sample that pays for one-time costs.

    denoise: default: flows that were trained with noise. options: decode's tol, init and the like.
    condition: labels, context, guidance. Of several processes each samples a batch, and all get all samples.
    """
    clean = bool(getattr(flow.config, "noise_std", 0.0)) if denoise is None else denoise
    chosen = flow.plan(plan, n=n, **(options or {}))
    flow.decode(flow.noise(1, seed), chosen, **select_rows(condition, slice(1), n))
    runs = []
    for i in range(repeats):
        progress(f"run {i + 1} of {repeats}")
        runs.append(_one_run(flow, n, chosen, seed, clean, condition))
    median = {name: np.median([run[name] for run in runs], axis=0).tolist() for name in runs[0]}
    blocks = zip(median.pop("seconds"), median.pop("sweeps"), strict=True)
    return Runtime(
        plan=plan if isinstance(plan, str) else "plan",
        batch=n,
        repeats=repeats,
        threads=torch.get_num_threads(),
        device=str(next(flow.parameters()).device),
        layers=tuple(BlockTime(seconds=seconds, sweeps=sweeps) for seconds, sweeps in blocks),
        gathered=n * _processes(),
        **median,
    )


def _one_run(
    flow: Flow, n: int, plan: Plan, seed: int, clean: bool, condition: dict[str, Any]
) -> dict[str, Any]:
    """Seconds of each part of one run; `seconds` and `sweeps` are those of the blocks."""
    device, processes = next(flow.parameters()).device, _processes()
    if processes > 1:
        dist.barrier()  # waiting for a late process is not communication
    marks: list[float] = []

    def mark() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    mark()
    z = flow.noise(n, seed)
    mark()
    out = flow.decode(z, plan, **condition)
    mark()
    x = flow.denoise(out.x, labels=condition.get("labels")) if clean else out.x
    mark()
    if processes > 1:
        dist.all_gather([torch.empty_like(x) for _ in range(processes)], x.contiguous())
    mark()
    noise, decoding, denoising, communication = (b - a for a, b in pairwise(marks))
    seconds = [b.seconds for b in out.stats.blocks]
    return {
        "total": marks[-1] - marks[0],
        "noise": noise,
        "denoising": denoising,
        "communication": communication,
        "rest": max(decoding - sum(seconds), 0.0),
        "seconds": seconds,
        "sweeps": [b.sweeps.double().mean().item() for b in out.stats.blocks],
    }


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
