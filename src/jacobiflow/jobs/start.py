"""Starting or resuming a job: one process decides what the job is, the others load the same flow."""

from __future__ import annotations

import math
import re
import resource
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from jacobiflow.core.files import remove_leftovers
from jacobiflow.core.hardware import (
    BILLION,
    available_memory,
    memory_limit,
    out_of_memory,
    require_memory,
    used_memory,
)
from jacobiflow.core.locks import Lock
from jacobiflow.core.method import Method, Plan
from jacobiflow.core.processes import World
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow.jobs.manifest import FILE, Job, JobError, fingerprint, versions
from jacobiflow.jobs.sampling import Settings
from jacobiflow.jobs.shards import PARTIAL, RECORDS, SHARDS, Record

SUMS = "SHA256SUMS"
MAX_BATCH = 256  # larger batches gain little on any device, and wait longer for their slowest sample
PROBE_SAMPLES = 4  # samples that memory is measured with
MEMORY_SHARE = 0.4  # of the free memory, for one batch: rows that stop are copied out of it
SHARD_BYTES = 64 * 2**20
SHARD_SAMPLES = 1024
Ask = Callable[[Flow], Settings]  # the settings that the user asks for, given the flow


def start(
    model: str, folder: Path, device: torch.device, ask: Ask, world: World, locks: ExitStack
) -> tuple[Job, Flow]:
    """The job in `folder`, new or resumed, and its flow; `locks` keeps the folder locked."""
    flows: list[Flow] = []

    def lead() -> tuple[Job, float]:
        old = Job.load(folder)
        revision = old.revision if old is not None and old.model == model else None
        flows.append(load(model, revision=revision, device=device))
        asked = ask(flows[0])
        asked.check(flows[0])  # mistakes of the user are found before a folder is made
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = locks.enter_context(Lock(folder))
            lock.exclusive()
            clear(folder)
            old = Job.load(folder)
            if old is None:
                job = _begin(model, flows[0], asked, folder, world)
            else:
                job = _resume(old, flows[0], asked, folder)
            lock.shared()
        except OSError as error:
            raise JobError(f"--out {folder} cannot be written to: {error.strerror}") from None
        return job, asked.max_memory

    job, gigabytes = world.share(lead)
    if not world.leader:
        flows.append(load(model, revision=job.revision, device=device))
        if fingerprint(flows[0]) != job.weights:
            raise JobError(f"{model} is another model here than where the first process runs")
        locks.enter_context(Lock(folder)).shared()
    locks.enter_context(memory_limit(gigabytes))  # what does not fit is decoded in parts
    return job, flows[0]


def _begin(model: str, flow: Flow, asked: Settings, folder: Path, world: World) -> Job:
    """A new job; what was left open is resolved now and stored."""
    torch.set_num_threads(asked.threads)
    like = next(flow.parameters())
    batch = min(asked.batch or find_batch(flow, asked, world.local_size), asked.n)
    shard = asked.shard or find_shard(flow, asked, batch)
    batch = min(batch, shard)
    require_memory(f"a shard of {shard} samples", 3 * shard * sample_bytes(flow), "use a smaller --shard")
    job = Job(
        settings=asked,
        model=model,
        plan=asked.resolve_plan(flow, batch),
        batch=batch,
        shard=shard,
        weights=fingerprint(flow),
        dtype=str(like.dtype).removeprefix("torch."),
        versions=versions(like.device),
        revision=flow.revision,
    ).signed()
    _refuse_other_shards(job, folder, new=True)
    _require_disk(job, flow, folder)
    job.save(folder)
    return job


def _resume(old: Job, flow: Flow, asked: Settings, folder: Path) -> Job:
    """The job of the manifest, if it is the one that is asked for."""
    old.compare(asked, fingerprint(flow), folder)
    _refuse_other_shards(old, folder, new=False)
    own = versions(next(flow.parameters()).device)
    changed = [f"{k} {v}, now {own.get(k)}" for k, v in old.versions.items() if own.get(k) != v]
    if changed:
        warnings.warn(
            f"the job began with {'; '.join(changed)}: the last digits of new samples may differ",
            stacklevel=2,
        )
    _require_disk(old, flow, folder)
    return old


def clear(folder: Path) -> None:
    """Make the folders of a job and remove what a killed one was writing; the folder must be locked."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    remove_leftovers(folder)
    for name, mode in ((PARTIAL, 0o700), (SHARDS, 0o777), (RECORDS, 0o777)):
        (folder / name).mkdir(mode=mode, exist_ok=True)
        if (folder / name).is_symlink():
            raise JobError(f"{folder / name} is a link, and a job writes into its own folder only: remove it")


def _refuse_other_shards(job: Job, folder: Path, *, new: bool) -> None:
    """Raise if the folder holds shards of another job: they would be overwritten or mixed with this one's.

    new: the folder has no manifest, so each file must be named by a record of this very job. Otherwise
    damaged files are made again, and only a record of another job is refused.
    """
    for path in sorted(p for place in (RECORDS, SHARDS) for p in (folder / place).glob("[!.]*")):
        if new and not _belongs(job, folder, path):
            raise JobError(
                f"{folder} has no {FILE}, and {path.relative_to(folder)} is not of this job: "
                f"restore the {FILE} of its job, or use a new --out"
            )
        record = Record.load(path) if path.parent.name == RECORDS else None
        if record is not None and record.job != job.digest:
            raise JobError(f"{path} is of another job: move it away with its shard, or use a new --out")


def _belongs(job: Job, folder: Path, path: Path) -> bool:
    """Whether a file is the record or the content of one of the job's finished shards."""
    number = int(path.stem) if re.fullmatch("[0-9]{6,10}", path.stem) else job.count
    return number < job.count and Record.read(folder, job.part(number)) is not None


def _require_disk(job: Job, flow: Flow, folder: Path) -> None:
    """Raise if the disk cannot hold the samples that are missing."""
    each = sample_bytes(flow)
    if job.settings.format == "png":
        each = math.prod(flow.data_shape) // 10  # packed pixels are not smaller
    need, free = each * (job.settings.n - job.finished(folder)), shutil.disk_usage(folder).free
    if need > free:
        raise JobError(
            f"-n {job.settings.n} needs {need / 1e9:,.1f} GB more in {folder}, the disk has "
            f"{free / 1e9:,.1f} GB: make room, or draw fewer"
        )


# Batch and shard sizes that memory allows


def find_batch(flow: Flow, settings: Settings, near: int) -> int:
    """The largest power of two, up to MAX_BATCH, whose decoding fits into the memory that is free now.

    near: how many processes share this machine's memory.
    """
    device = next(flow.parameters()).device
    count = min(PROBE_SAMPLES, settings.n)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory() / near
    if settings.max_memory and device.type == "cpu":
        free = min(free, settings.max_memory * BILLION - used_memory())
    try:
        need = _measure(flow, settings, count)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise JobError(f"not even {count} samples fit into memory ({free / 1e9:.1f} GB are free)") from None
    fits = MEMORY_SHARE * free / max(need / count, 1.0)
    if fits < 1:
        raise JobError(
            f"a sample needs {need / count / 1e9:.1f} GB of memory to decode and {free / 1e9:.1f} GB "
            "are free: use a larger machine, raise --max-memory, or set --batch"
        )
    return int(2 ** math.floor(math.log2(min(fits, MAX_BATCH))))


def _measure(flow: Flow, settings: Settings, count: int) -> int:
    """Bytes that one sweep over whole sequences of `count` samples takes, with gradients if it denoises."""
    device = next(flow.parameters()).device
    sweep = Plan((Method(max_sweeps=1),) * len(flow.blocks))

    def once(n: int) -> None:
        options = settings.decode_options(0, n)
        x = flow.decode(flow.noise(n, 0), sweep, on_failure="return", warn=False, **options).x
        if settings.denoise:
            flow.denoise(x, labels=options["labels"])

    once(1)  # what a flow makes at its first use is not counted
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once(count)
        return torch.cuda.max_memory_allocated(device) - before
    before = _peak()
    once(count)
    return _peak() - before


def _peak() -> int:
    """The most memory in bytes that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def find_shard(flow: Flow, settings: Settings, batch: int) -> int:
    """Samples per shard: whole batches, about SHARD_SAMPLES and at most SHARD_BYTES."""
    most = min(SHARD_SAMPLES, max(1, SHARD_BYTES // sample_bytes(flow)), settings.n)
    return max(1, most // batch) * batch


def sample_bytes(flow: Flow) -> int:
    """Bytes of one sample."""
    return math.prod(flow.data_shape) * next(flow.parameters()).element_size()
