"""Where the seconds of sampling go: each layer, and the rest."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.layers import part, plain


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """One layer's seconds and its mean number of sweeps."""

    seconds: float
    sweeps: float


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """One plan: medians over the runs, seconds of one batch; layers in sampling order."""

    plan: str
    batch: int
    repeats: int
    threads: int
    device: str
    layers: tuple[LayerTime, ...]
    noise: float
    denoising: float
    communication: float  # gathering the samples of all processes; next to nothing on one
    gathered: int  # samples that every process has in the end: its batch, and those of the others
    rest: float  # between the layers: permutations, the prior, patches
    total: float

    @property
    def other(self) -> float:
        """All that is not a layer."""
        return self.noise + self.denoising + self.communication + self.rest

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the total: each layer, then what is not a layer."""
        whole = sum(layer.seconds for layer in self.layers) + self.other
        return tuple(s / whole for s in (*(layer.seconds for layer in self.layers), self.other))

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the sum of the rest and the shares."""
        return plain(self) | {"other": self.other, "shares": list(self.shares)}


def runtime(
    flow: Flow,
    n: int,
    plan: str | Plan = "selective",
    *,
    repeats: int = 3,
    seed: int = 0,
    denoise: bool | None = None,
    options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **condition: Any,
) -> Runtime:
    """Sample a batch of n `repeats` times, after one that pays for what a flow makes at its first use.

    denoise: None denoises flows that were trained with noise. options: decode's tol, init and the like.
    condition: labels, context, guidance. Of several processes each samples a batch, and all get all samples.
    """
    device = next(flow.parameters()).device
    clean = bool(getattr(flow.config, "noise_std", 0.0)) if denoise is None else denoise
    chosen = flow.plan(plan, n=n, **(options or {}))
    few = part(condition, slice(1), n)
    flow.decode(flow.noise(1, seed), chosen, **few)
    runs = []
    for i in range(repeats):
        progress(f"run {i + 1} of {repeats}")
        seconds, gathered = _once(flow, n, chosen, seed, clean, device, condition)
        runs.append(seconds)
    middle = [statistics.median(values) for values in zip(*runs, strict=True)]
    layers = len(flow.blocks)
    total, noise, denoising, communication, rest = middle[2 * layers :]
    return Runtime(
        plan=plan if isinstance(plan, str) else "plan",
        batch=n,
        repeats=repeats,
        threads=torch.get_num_threads(),
        device=str(device),
        layers=tuple(LayerTime(seconds=middle[2 * i], sweeps=middle[2 * i + 1]) for i in range(layers)),
        noise=noise,
        denoising=denoising,
        communication=communication,
        gathered=gathered,
        rest=rest,
        total=total,
    )


def _once(
    flow: Flow,
    n: int,
    plan: Plan,
    seed: int,
    clean: bool,
    device: torch.device,
    condition: dict[str, Any],
) -> tuple[list[float], int]:
    """Seconds and sweeps of each layer in turn, then total, noise, denoising, communication, rest; and how
    many samples there are in the end."""
    if _several():
        dist.barrier()  # waiting for a late one is no communication
    marks = [_now(device)]
    z = flow.noise(n, seed)
    marks.append(_now(device))
    out = flow.decode(z, plan, **condition)
    marks.append(_now(device))
    x = flow.denoise(out.x, labels=condition.get("labels")) if clean else out.x
    marks.append(_now(device))
    gathered = len(_gather(x))
    marks.append(_now(device))
    noise, decoding, denoising, communication = (b - a for a, b in pairwise(marks))
    blocks = out.stats.blocks
    rest = max(decoding - sum(b.seconds for b in blocks), 0.0)
    values = [v for b in blocks for v in (b.seconds, b.sweeps.double().mean().item())]
    return [*values, marks[-1] - marks[0], noise, denoising, communication, rest], gathered


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _gather(x: Tensor) -> Tensor:
    """The samples of all processes, on each of them, as the paper's sampling on several devices ends."""
    if not _several():
        return x
    found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(found, x.contiguous())
    return torch.cat(found)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
