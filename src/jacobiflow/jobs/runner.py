"""Running a job, by one process or many: one decides what the job is, all make what is missing or damaged."""

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

from jacobiflow.core.files import MAX_TEXT_BYTES, remove_leftovers, write_atomically, write_errors, write_text
from jacobiflow.core.hardware import memory_limit, out_of_memory, require_memory
from jacobiflow.core.processes import Lock, StopKey, World, leave_process_group
from jacobiflow.core.progress import progress_bar
from jacobiflow.core.results import STATUSES
from jacobiflow.core.tables import counted
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.checks import PROBES
from jacobiflow.flows.flow import Flow
from jacobiflow.jobs.manifest import FILE, PARTIAL, RECORD, RECORDS, SHARDS, Job, Record, fingerprint, versions
from jacobiflow.jobs.sampling import JobError, Settings, draw, find_batch, find_shard, sample_bytes

SUMS = "SHA256SUMS"
POLL_SECONDS = 1.0  # between looks at the folder
Ask = Callable[[Flow], Settings]  # the settings that the user asks for, given the flow


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
        lines = [f"{self.job.settings.n:,} samples in {self.job.count:,} shards in {folder}, {made}: {counts}"]
        if self.nonfinite:
            what = "has no PNG" if self.job.settings.format == "png" else "is NaN in its shard"
            lines.append(f'a nonfinite sample {what}; its record in {RECORDS} lists it under "nonfinite"')
        if self.smaller:
            lines.append(f"memory ran out in {self.smaller:,} shards: their records give the smaller batches")
        return "\n".join(lines)


def run(model: str, folder: Path, device: torch.device, ask: Ask, report: Callable[[str], None]) -> Outcome | None:
    """Start or resume the job in `folder` and finish it, told by `report`; None on all processes but the first."""
    world = World.from_environment()
    with ExitStack() as held:
        held.callback(leave_process_group)
        job, flow = start(model, folder, world.device(device), ask, world, held)
        if world.leader:
            _announce(job, flow, folder, world, report)
        made = _make_missing(job, flow, folder, world)
        return _close(job, folder, made) if world.leader else None


def _announce(job: Job, flow: Flow, folder: Path, world: World, report: Callable[[str], None]) -> None:
    """Say what is about to be done, how to use all cores, and whether the plan is too loose for the first samples."""
    threads, cores = job.settings.threads, os.cpu_count() or 1
    report(
        f"{job.settings.n:,} samples in {job.count:,} shards of {job.shard:,}, batches of {job.batch}, on "
        f"{world.size} x {job.settings.device} with {counted(threads, 'thread')}, into {folder}"
    )
    if done := job.finished(folder):
        report(f"resuming: {done:,} samples are there already")
    if job.settings.device == "cpu" and cores >= 2 * world.local_size * threads:
        command = f"torchrun --nproc-per-node {cores // threads} -m jacobiflow.cli.main sample ..."
        report(f"this machine has {cores} cores: `{command}` uses them all and draws the same samples")
    if job.settings.plan not in ("auto", "sequential") and done < job.settings.n:  # those bound the deviation
        stats = job.settings.decode(flow, job.plan, range(min(PROBES, job.batch)), check=True).stats
        if stats.residual is not None and stats.loose:
            residual = f"{float(stats.residual.max()):.2g}"
            report(f"samples are far from exact, residual {residual}: lower --tol, or use --plan auto")


def start(model: str, folder: Path, device: torch.device, ask: Ask, world: World, held: ExitStack) -> tuple[Job, Flow]:
    """The job in `folder`, new or resumed, and its flow; `held` keeps the folder locked."""
    flows: list[Flow] = []

    def lead() -> tuple[Job, float]:
        old = Job.load(folder)
        flow = load(model, revision=old.revision if old and old.model == model else None, device=device)
        flows.append(flow)
        asked = ask(flow)
        asked.check(flow)  # mistakes of the user are found before a folder is made
        with write_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context(Lock(folder))
            lock.exclusive()
            clear(folder)
            if old := Job.load(folder):
                old.compare(asked, flow, folder)
            job = old or _new_job(model, flow, asked, world)
            _refuse_other_shards(job, folder, new=not old)
            _require_disk(job, flow, folder)
            if not old:
                if len(text := job.to_json()) > MAX_TEXT_BYTES:  # no restart could read it
                    raise JobError("these settings cannot be written down: use shorter ones, or a smaller plan")
                write_text(folder / FILE, text)
            lock.shared()
        return job, asked.max_memory

    job, gigabytes = world.share(lead)
    if not world.leader:
        flows.append(load(model, revision=job.revision, device=device))
        if fingerprint(flows[0]) != job.weights:
            raise JobError(f"{model} is another model here than where the first process runs")
        held.enter_context(Lock(folder)).shared()
    held.enter_context(memory_limit(gigabytes))  # what does not fit is decoded in parts
    return job, flows[0]


def _new_job(model: str, flow: Flow, asked: Settings, world: World) -> Job:
    """A new job: what was left open is resolved now."""
    torch.set_num_threads(asked.threads)
    batch = min(asked.batch or find_batch(flow, asked, world.local_size), asked.n)
    shard = asked.shard or find_shard(flow, asked, batch)
    batch = min(batch, shard)
    require_memory(f"a shard of {shard} samples", 3 * shard * sample_bytes(flow), "use a smaller --shard")
    like = next(flow.parameters())
    return Job(
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


def clear(folder: Path) -> None:
    """Make the folders of a job and remove what a killed one was writing; the folder must be locked."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    remove_leftovers(folder)
    for name, mode in ((PARTIAL, 0o700), (SHARDS, 0o777), (RECORDS, 0o777)):
        (folder / name).mkdir(mode=mode, exist_ok=True)
        if (folder / name).is_symlink():
            raise JobError(f"{folder / name} is a link, and a job writes into its own folder only: remove it")


def _refuse_other_shards(job: Job, folder: Path, *, new: bool) -> None:
    """Raise if the folder holds shards of another job; if it is new, each file needs a record of this job."""
    for path in sorted(p for place in (RECORDS, SHARDS) for p in (folder / place).glob("[!.]*")):
        number = int(path.stem) if path.stem.isdecimal() else job.count  # which has no record
        if new and job.record(folder, number) is None:
            wrong = f"{folder} has no {FILE}, and {path.relative_to(folder)} is not of this job"
            raise JobError(f"{wrong}: restore the {FILE} of its job, or use a new --out")
        record = Record.load(path) if path.parent.name == RECORDS else None
        if record and record.job != job.digest:
            raise JobError(f"{path} is of another job: move it away with its shard, or use a new --out")


def _require_disk(job: Job, flow: Flow, folder: Path) -> None:
    """Raise if the disk cannot hold the samples that are missing."""
    each = sample_bytes(flow) // (80 if job.settings.format == "png" else 1)  # packed pixels are not smaller
    need, free = each * (job.settings.n - job.finished(folder)), shutil.disk_usage(folder).free
    if need > free:
        more = f"needs {need / 1e9:,.1f} GB more in {folder}, the disk has {free / 1e9:,.1f} GB"
        raise JobError(f"-n {job.settings.n} {more}: make room, or draw fewer")


def _make_missing(job: Job, flow: Flow, folder: Path, world: World) -> int:
    """Make all shards that are missing or damaged; how many they are, over all processes."""
    torch.set_num_threads(job.settings.threads)
    group, done = world.patient_group(), job.finished(folder)
    bar = progress_bar(total=job.settings.n, initial=done, unit="sample", smoothing=0, disable=not world.leader)
    with StopKey() as stop, bar:
        missing, looked = list[tuple[int, int]](), time.monotonic()
        for number in range(world.rank, job.count, world.size):
            record = job.record(folder, number)
            if record is None or not job.holds(folder, number, record):
                (folder / RECORD.format(number)).unlink(missing_ok=True)
                missing.append((number, record.batch if record else job.batch))
            _stop_if_pressed(stop, job, folder, world)
        todo = sorted(pair for part in world.gather(missing, group) for pair in part)
        for number, batch in todo[world.rank :: world.size]:
            _make(job, flow, folder, number, batch)
            if time.monotonic() > looked + POLL_SECONDS:  # a folder may have a million records
                bar.update(job.finished(folder) - bar.n)
                looked = time.monotonic()
            _stop_if_pressed(stop, job, folder, world)
        world.gather(None, group)
    return len(todo)


def _stop_if_pressed(stop: StopKey, job: Job, folder: Path, world: World) -> None:
    if stop.pressed:
        done = f"{job.finished(folder):,} of {job.settings.n:,} samples"
        error = JobError(f"stopped with {done} in {folder}: rerun the command to resume")
        raise error if world.leader else SystemExit(0)


def _make(job: Job, flow: Flow, folder: Path, number: int, batch: int) -> None:
    """Decode and write one shard, in smaller batches if memory runs out."""
    rows = job.rows(number)
    while True:
        try:
            samples = draw(job.settings, job.plan, flow, rows, batch)
            break
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if batch == 1:
                raise JobError(f"out of memory at sample {rows.start}, even in batches of one") from None
        batch = -(-batch // 2)
        torch.cuda.empty_cache()  # nothing happens on a CPU
    with write_errors(folder):
        job.finish(folder, number, samples, batch, versions(next(flow.parameters()).device))


def _close(job: Job, folder: Path, made: int) -> Outcome:
    """All shards are there: write the checksums of all files, in the format of sha256sum."""
    count = Counter[str]()

    def write_sums(path: str) -> None:
        with open(path, "w", encoding="utf-8") as f:
            for number in range(job.count):
                if (record := job.record(folder, number)) is None:
                    raise JobError(f"shard {number} of {folder} has gone: rerun the command to make it again")
                f.writelines(f"{value}  {name}\n" for name, value in record.files.items())
                count.update(record.status, smaller=record.batch < job.batch)

    with write_errors(folder):
        write_atomically(folder / SUMS, write_sums, partial=folder / PARTIAL)
        shutil.rmtree(folder / PARTIAL)
    status = {s.name: count[s.name] for s in STATUSES if count[s.name]}
    return Outcome(job, made, status, count["NONFINITE"], count["smaller"])
