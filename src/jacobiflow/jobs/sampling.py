"""What is drawn: the settings, checked against a flow, the loop that draws in batches, and their size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from jacobiflow.core.hardware import BILLION, available_memory, out_of_memory, peak_memory, used_memory
from jacobiflow.core.method import Init, Method, Plan
from jacobiflow.core.progress import progress_bar
from jacobiflow.core.results import Decoded, JacobiflowError, Stats, Status, joined, nonfinite_rows
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.kernels.backend import Backend

Format = Literal["npz", "safetensors", "png"]
MAX_BATCH = 256  # larger batches gain little on any device, and wait longer for their slowest sample
PROBE_SAMPLES = 4  # samples that memory is measured with
MEMORY_SHARE = 0.4  # of the free memory, for one batch: rows that stop are copied out of it
SHARD_BYTES = 64 * 2**20
SHARD_SAMPLES = 1024


class JobError(JacobiflowError):
    """A job that cannot start or resume; nothing that it has written is lost."""


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
        return Guidance(weight=self.guidance, annealed=self.annealed, what=self.guide, attn_temp=self.attn_temp)

    def decode(self, flow: Flow, plan: Plan, rows: range, **options: Any) -> Decoded:
        """The samples of these numbers, denoised if asked for."""
        labels = labels_in_turn(self.labels, rows)
        z = flow.noise(len(rows), self.seed, start=rows.start)
        options |= {"labels": labels, "backend": self.backend, "guidance": self.guidance_options}
        out = flow.decode(z, plan, warn=False, **options)
        return replace(out, x=flow.denoise(out.x, labels=labels)) if self.denoise else out

    def check(self, flow: Flow) -> None:
        """Raise if the flow cannot do this, before anything is written."""
        if self.denoise and not flow.noise_std:
            raise ValueError("--denoise: this flow was trained without Gaussian noise, leave it out")
        if self.format == "png" and flow.image_shape is None:
            raise ValueError(f"--format png: samples of shape {list(flow.data_shape)} are no images, use npz")
        if not 0 <= self.max_memory < math.inf:
            raise ValueError(f"--max-memory takes GB above 0, not {self.max_memory:g}")
        if self.plan != "auto":
            self.resolve_plan(flow, 1)

    def resolve_plan(self, flow: Flow, batch: int) -> Plan:
        """The plan for batches of this size; "auto" depends on it."""
        if self.plan.startswith("{"):
            return flow.plan(Plan.from_json(self.plan))
        asked: dict[str, Any] = {"tol": self.tol, "init": self.init, "max_deviation": self.max_deviation}
        return flow.plan(self.plan, n=batch, guidance=self.guidance_options, backend=self.backend, **asked)

    def compared(self, flow: Flow) -> dict[str, Any]:
        """What another job would differ in: of a plan from a file its methods, and no memory limit."""
        plan = self.resolve_plan(flow, 1).methods if self.plan.startswith("{") else self.plan
        sizes = {"batch": self.batch or "auto", "shard": self.shard or "auto", "max_memory": None}
        return asdict(self) | sizes | {"plan": plan}


def labels_in_turn(labels: Sequence[int], rows: range) -> Tensor | None:
    """The labels of the samples of these numbers; None without labels.

    >>> labels_in_turn((0, 1, 2), range(2, 6)).tolist()
    [2, 0, 1, 2]
    """
    return torch.tensor([labels[i % len(labels)] for i in rows]) if labels else None


@dataclass(frozen=True)
class Samples:
    """Samples on the CPU and how they were drawn."""

    x: Tensor
    labels: Tensor | None
    status: Counter[str]  # how many samples ended how
    stats: Stats


def draw(
    settings: Settings, plan: Plan, flow: Flow, rows: range, batch: int, *, check: bool = False, progress: bool = False
) -> Samples:
    """The samples of these numbers. One that is not finite, or not after denoising, is NaN and counts as NONFINITE."""
    parts: list[Decoded] = []
    with progress_bar(total=len(rows), unit="sample", disable=not progress) as bar:
        for some in (rows[i : i + batch] for i in range(0, len(rows), batch)):
            part = settings.decode(flow, plan, some, check=check)
            parts.append(replace(part, x=part.x.cpu()))
            bar.update(len(some))
    out = joined(parts)
    pairs = zip(out.stats.ends, nonfinite_rows(out.x).tolist(), strict=True)
    ends = [Status.NONFINITE if lost else end for end, lost in pairs]
    out.x[torch.tensor([end is Status.NONFINITE for end in ends])] = float("nan")
    return Samples(out.x, labels_in_turn(settings.labels, rows), Counter(end.name for end in ends), out.stats)


def find_batch(flow: Flow, settings: Settings, near: int) -> int:
    """The largest power of two, up to MAX_BATCH, that fits into the memory that `near` processes share now."""
    device, count = next(flow.parameters()).device, min(PROBE_SAMPLES, settings.n)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory() / near
    if settings.max_memory and device.type == "cpu":
        free = min(free, settings.max_memory * BILLION - used_memory())
    try:
        fits = MEMORY_SHARE * free * count / max(_measure(flow, settings, count), 1)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        fits = 0.0
    if fits < 1:
        advice = "use a larger machine, raise --max-memory, or set --batch"
        raise JobError(f"a sample needs more memory to decode than is free ({free / 1e9:.1f} GB): {advice}")
    return int(2 ** math.floor(math.log2(min(fits, MAX_BATCH))))


def _measure(flow: Flow, settings: Settings, count: int) -> int:
    """Bytes that one sweep over whole sequences of `count` samples takes, with gradients if it denoises."""
    device = next(flow.parameters()).device
    sweep, cuda = Plan((Method(max_sweeps=1),) * len(flow.blocks)), device.type == "cuda"
    settings.decode(flow, sweep, range(1), on_failure="return")  # what a flow makes at its first use is not counted
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else peak_memory()
    settings.decode(flow, sweep, range(count), on_failure="return")
    return (torch.cuda.max_memory_allocated(device) if cuda else peak_memory()) - before


def find_shard(flow: Flow, settings: Settings, batch: int) -> int:
    """Samples per shard: whole batches, about SHARD_SAMPLES and at most SHARD_BYTES."""
    return max(1, min(SHARD_SAMPLES, SHARD_BYTES // sample_bytes(flow), settings.n) // batch) * batch


def sample_bytes(flow: Flow) -> int:
    """Bytes of one sample."""
    return math.prod(flow.data_shape) * next(flow.parameters()).element_size()
