"""What is drawn: the settings, checked against a flow, and the loop that draws samples in batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from jacobiflow.core.method import Init, Plan
from jacobiflow.core.pictures import as_images
from jacobiflow.core.progress import progress_bar
from jacobiflow.core.results import Status, nonfinite_rows
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.kernels.backend import Backend

Format = Literal["npz", "safetensors", "png"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What is asked for. A job can be resumed with equal settings only."""

    n: int
    seed: int = 0
    labels: tuple[int, ...] = ()  # samples take them in turn; () is unconditional
    plan: str = "auto"  # its name, or the JSON of a plan from a file
    tol: float | None = None
    init: Init | None = None
    max_deviation: float | None = None
    guidance: float = 0.0
    guide: Literal["a", "b", "ab"] = "ab"
    annealed: bool = False
    attn_temp: float = 1.0
    denoise: bool = False
    format: Format = "npz"
    device: str = "cpu"
    threads: int = 1
    batch: int = 0  # 0: as memory allows
    shard: int = 0  # 0: about a thousand samples
    max_memory: float = 0.0  # GB per process, which may change when a job resumes; 0: all that is free
    backend: Backend | None = None  # None: the fastest that supports the model

    @property
    def guidance_options(self) -> Guidance:
        """Guidance as a flow takes it."""
        return Guidance(
            weight=self.guidance, annealed=self.annealed, what=self.guide, attn_temp=self.attn_temp
        )

    def decode_options(self, first: int, count: int) -> dict[str, Any]:
        """The options of `flow.decode` for samples first .. first + count - 1."""
        labels = labels_in_turn(self.labels, count, first)
        guidance = {"guidance": self.guidance_options} if self.guidance else {}
        return {"labels": labels, "backend": self.backend, **guidance}

    def check(self, flow: Flow) -> None:
        """Raise if the flow cannot do this, before anything is written."""
        if self.denoise and not getattr(flow.config, "noise_std", 0.0):
            raise ValueError("--denoise: this flow was trained without Gaussian noise, leave it out")
        if self.format == "png" and as_images(torch.zeros(1, *flow.data_shape)) is None:
            raise ValueError(f"--format png: samples of shape {list(flow.data_shape)} are no images, use npz")
        if not 0 <= self.max_memory < math.inf:
            raise ValueError(f"--max-memory takes GB above 0, not {self.max_memory:g}")
        if self.plan != "auto":
            self.resolve_plan(flow, 1)

    def resolve_plan(self, flow: Flow, batch: int) -> Plan:
        """The plan for batches of this size; "auto" depends on it."""
        if self.plan.startswith("{"):
            return flow.plan(Plan.from_json(self.plan))
        return flow.plan(
            self.plan,
            tol=self.tol,
            init=self.init,
            max_deviation=self.max_deviation,
            n=batch,
            guidance=self.guidance_options,
            backend=self.backend,
        )


def labels_in_turn(labels: tuple[int, ...], count: int, first: int = 0) -> Tensor | None:
    """The labels of samples first .. first + count - 1; None without labels.

    >>> labels_in_turn((0, 1, 2), 4, first=2).tolist()
    [2, 0, 1, 2]
    """
    return torch.tensor(labels)[torch.arange(first, first + count) % len(labels)] if labels else None


@dataclass(frozen=True)
class Samples:
    """Samples on the CPU and how they were drawn."""

    x: Tensor
    labels: Tensor | None
    status: Counter[str]  # how many samples ended how
    seconds: float
    backend: str
    residual: float | None  # the largest |encode(x) - z|, if asked for


def draw(
    settings: Settings,
    plan: Plan,
    flow: Flow,
    first: int,
    count: int,
    batch: int,
    *,
    check: bool = False,
    progress: bool = False,
) -> Samples:
    """Samples first .. first + count - 1, in batches; progress: show a bar.

    A sample that is not finite, before or after denoising, is NaN throughout and counts as NONFINITE.
    """
    xs, status, seconds, backends, residuals = [], Counter[str](), 0.0, [], []
    bar = progress_bar(total=count, unit=" samples", disable=not progress)
    for start in range(first, first + count, batch):
        rows = min(batch, first + count - start)
        options = settings.decode_options(start, rows)
        z = flow.noise(rows, settings.seed, start=start)
        out = flow.decode(z, plan, check=check, warn=False, **options)
        x = (flow.denoise(out.x, labels=options["labels"]) if settings.denoise else out.x).cpu()
        ends = zip(*(block.status for block in out.stats.blocks), nonfinite_rows(x).tolist(), strict=True)
        worst = [Status.NONFINITE if lost else max(s, key=lambda s: s.rank) for *s, lost in ends]
        x[torch.tensor([s is Status.NONFINITE for s in worst])] = float("nan")
        xs.append(x)
        status.update(s.name for s in worst)
        seconds += out.stats.seconds
        backends.append(out.stats.backend)
        bar.update(rows)
        if out.stats.residual is not None:
            residuals.append(out.stats.residual.max().item())
    bar.close()
    labels = labels_in_turn(settings.labels, count, first)
    residual = max(residuals) if residuals else None
    return Samples(torch.cat(xs), labels, status, seconds, " + ".join(sorted(set(backends))), residual)
