"""Running a job: shards that are missing or damaged are decoded and written, by one process or many."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from jacobiflow.core.files import write_atomically, write_errors
from jacobiflow.core.hardware import out_of_memory
from jacobiflow.core.processes import StopKey, World, leave_process_group
from jacobiflow.core.progress import progress_bar
from jacobiflow.core.results import STATUSES
from jacobiflow.flows.flow import Flow
from jacobiflow.jobs.manifest import Job, JobError, versions
from jacobiflow.jobs.sampling import draw
from jacobiflow.jobs.shards import PARTIAL, RECORDS, Record, Shard, finish
from jacobiflow.jobs.start import SUMS, Ask, start

POLL_SECONDS = 1.0  # between looks at the folder


@dataclass(frozen=True)
class Outcome:
    """What a finished job holds."""

    job: Job
    made: int  # shards that this run made, over all processes
    status: dict[str, int]  # how many samples ended how
    nonfinite: int  # samples that are NaN, or have no PNG
    smaller: int  # shards that were decoded in smaller batches because memory ran out

    def summary(self, folder: Path) -> str:
        """What there is now, for people."""
        made = f"{self.made:,} made now" if self.made else "all of them complete before"
        counts = ", ".join(f"{count:,} {name.lower()}" for name, count in self.status.items())
        n, shards = self.job.settings.n, self.job.count
        lines = [f"{n:,} samples in {shards:,} shards in {folder}, {made}: {counts}"]
        if self.nonfinite:
            what = "has no PNG" if self.job.settings.format == "png" else "is NaN in its shard"
            lines.append(f'a nonfinite sample {what}; its record in {RECORDS} lists it under "nonfinite"')
        if self.smaller:
            lines.append(f"memory ran out in {self.smaller:,} shards: their records give the smaller batches")
        return "\n".join(lines)


def run(
    model: str, folder: Path, device: torch.device, ask: Ask, report: Callable[[str], None]
) -> Outcome | None:
    """Start or resume the job in `folder` and finish it; None on all processes but the first.

    ask: gives the settings for the flow. report: is called with lines for people.
    """
    world = World.from_environment()
    try:
        with ExitStack() as locks:
            job, flow = start(model, folder, world.device(device), ask, world, locks)
            if world.leader:
                _announce(job, folder, device.type, world, report)
            return _finish_shards(job, flow, folder, world)
    finally:
        leave_process_group()


def _announce(job: Job, folder: Path, device: str, world: World, report: Callable[[str], None]) -> None:
    """Say what is about to be done, and how to use all cores."""
    threads, cores = job.settings.threads, os.cpu_count() or 1
    report(
        f"{job.settings.n:,} samples in {job.count:,} shards of {job.shard:,}, batches of {job.batch}, on "
        f"{world.size} x {device} with {threads} thread{'s' * (threads > 1)}, into {folder}"
    )
    if device == "cpu" and cores >= 2 * world.local_size * threads:
        command = f"torchrun --nproc-per-node {cores // threads} -m jacobiflow.cli.main sample ..."
        report(f"this machine has {cores} cores: `{command}` uses them all and draws the same samples")


def _finish_shards(job: Job, flow: Flow, folder: Path, world: World) -> Outcome | None:
    """Make all shards that are missing or damaged; the leader returns the outcome."""
    torch.set_num_threads(job.settings.threads)
    group, shown = world.patient_group(), {"total": job.settings.n, "initial": job.finished(folder)}
    bar = progress_bar(unit=" samples", smoothing=0, disable=not world.leader, **shown)
    with StopKey() as stop, bar:
        missing, looked = list[tuple[int, int]](), time.monotonic()
        for number in range(world.rank, job.count, world.size):
            missing += _check(job, folder, job.part(number))
            _stop_if_pressed(stop, job, folder, world)
        todo = sorted(pair for part in world.gather(missing, group) for pair in part)
        for number, batch in todo[world.rank :: world.size]:
            _make(job, flow, folder, job.part(number), batch)
            if time.monotonic() > looked + POLL_SECONDS:  # a folder may have a million records
                bar.update(job.finished(folder) - bar.n)
                looked = time.monotonic()
            _stop_if_pressed(stop, job, folder, world)
        world.gather(None, group)
    return _close(job, folder, len(todo)) if world.leader else None


def _check(job: Job, folder: Path, shard: Shard) -> list[tuple[int, int]]:
    """The shard's number and batch size if it must be made; nothing if it is there and undamaged."""
    record = Record.read(folder, shard)
    if record is not None and record.holds(folder, shard):
        return []
    (folder / shard.record).unlink(missing_ok=True)
    return [(shard.number, record.batch if record else job.batch)]


def _stop_if_pressed(stop: StopKey, job: Job, folder: Path, world: World) -> None:
    if not stop.pressed:
        return
    if not world.leader:
        raise SystemExit(0)
    raise JobError(
        f"stopped with {job.finished(folder):,} of {job.settings.n:,} samples in {folder}: "
        "rerun the command to resume"
    )


def _make(job: Job, flow: Flow, folder: Path, shard: Shard, batch: int) -> None:
    """Decode and write one shard, in smaller batches if memory runs out."""
    while True:
        try:
            samples = draw(job.settings, job.plan, flow, shard.first, shard.count, batch)
            break
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if batch == 1:
                raise JobError(f"out of memory at sample {shard.first}, even in batches of one") from None
        batch = -(-batch // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    with write_errors(folder):
        finish(
            folder,
            shard,
            shard.encode(samples.x, samples.labels),
            batch=batch,
            status=dict(samples.status),
            nonfinite=shard.nonfinite(samples.x),
            versions=versions(next(flow.parameters()).device),
        )


def _close(job: Job, folder: Path, made: int) -> Outcome:
    """All shards are there: write the checksums of all files, in the format of sha256sum."""
    status, nonfinite, smaller = Counter[str](), 0, 0

    def write_sums(path: str) -> None:
        nonlocal nonfinite, smaller
        with open(path, "w", encoding="utf-8") as f:
            for number in range(job.count):
                record = Record.read(folder, job.part(number))
                if record is None:
                    raise JobError(f"shard {number} of {folder} has gone: rerun the command to make it again")
                f.writelines(f"{value}  {name}\n" for name, value in record.files.items())
                status.update(record.status)
                nonfinite += len(record.nonfinite)
                smaller += record.batch < job.batch

    with write_errors(folder):
        write_atomically(folder / SUMS, write_sums, partial=folder / PARTIAL)
        shutil.rmtree(folder / PARTIAL)
    ends = {s.name: status[s.name] for s in STATUSES if status[s.name]}
    return Outcome(job, made, ends, nonfinite, smaller)
