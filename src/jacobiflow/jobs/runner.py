"""Running a job: what is damaged or missing is shared out, decoded and written, by one process or many."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.files import write_atomically
from jacobiflow.core.hardware import out_of_memory
from jacobiflow.core.processes import StopKey, World
from jacobiflow.core.types import STATUSES, Status
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.nonfinite import nonfinite_rows
from jacobiflow.jobs.manifest import FILE, Job, JobError
from jacobiflow.jobs.progress import Progress, done
from jacobiflow.jobs.shards import PARTIAL, RECORDS, SHARDS, Record, Shard, finish, turn

SUMS = "SHA256SUMS"


@dataclass(frozen=True)
class Outcome:
    """What a finished job holds."""

    shards: int
    made: int  # shards that this run has made, over all processes
    status: dict[str, int]  # how many samples ended how
    nonfinite: int  # samples that are NaN, or have no PNG
    smaller: int  # shards that were decoded in smaller batches because memory ran out


def clear(folder: Path) -> None:
    """Room to write in; what a killed job was writing goes. For the one who has locked the folder alone."""
    shutil.rmtree(folder / PARTIAL, ignore_errors=True)
    for left in (path for name in (FILE, SUMS) for path in folder.glob(f".{name}.*")):
        left.unlink(missing_ok=True)
    for name, mode in ((PARTIAL, 0o700), (SHARDS, 0o777), (RECORDS, 0o777)):
        (folder / name).mkdir(mode=mode, exist_ok=True)
        if (folder / name).is_symlink():
            raise JobError(f"{folder / name} is a link, and a job writes into its own folder only: remove it")


def refuse_others(job: Job, folder: Path, *, new: bool) -> None:
    """Refuse a folder with shards of another job: they would be overwritten, or mixed with this one's.

    new: there was no manifest, so that each shard needs a record which says that it is of this very job.
    Otherwise what is damaged is made again, and only a record of another job is refused.
    """
    for path in sorted(p for place in (RECORDS, SHARDS) for p in (folder / place).glob("[!.]*")):
        if new and not _own(job, folder, path):
            raise JobError(
                f"{folder} has no {FILE}, and {path.relative_to(folder)} is not of this job: "
                f"restore the {FILE} of its job, or use a new --out"
            )
        record = Record.load(path) if path.parent.name == RECORDS else None
        if record is not None and record.job != job.digest:
            raise JobError(f"{path} is of another job: move it away with its shard, or use a new --out")


def _own(job: Job, folder: Path, path: Path) -> bool:
    """Whether a file of `folder` is the record or the content of one of the job's finished shards."""
    number = int(path.stem) if re.fullmatch("[0-9]{6,10}", path.stem) else job.count
    return number < job.count and Record.read(folder, job.part(number)) is not None


def run(job: Job, flow: Flow, folder: Path, world: World, versions: dict[str, str]) -> Outcome | None:
    """Make all shards that are not there or not whole; the leader returns what there is then."""
    torch.set_num_threads(job.settings.threads)
    group = world.patience()
    with StopKey() as stop, Progress(folder, job) if world.leader else nullcontext():
        wanting: list[tuple[int, int]] = []
        for number in range(world.rank, job.count, world.size):
            wanting += _check(job, folder, job.part(number))
            _heed(stop, job, folder, world)
        todo = sorted(pair for part in world.gather(wanting, group) for pair in part)
        for number, batch in todo[world.rank :: world.size]:
            _make(job, flow, folder, job.part(number), batch, versions)
            _heed(stop, job, folder, world)
        world.gather(None, group)
    return _close(job, folder, len(todo)) if world.leader else None


def _check(job: Job, folder: Path, shard: Shard) -> list[tuple[int, int]]:
    """The number of a shard that must be made, and its batch size; nothing if it is there and whole."""
    record = Record.read(folder, shard)
    if record is not None and record.holds(folder, shard):
        return []
    (folder / shard.record).unlink(missing_ok=True)
    return [(shard.number, record.batch if record else job.batch)]


def _heed(stop: StopKey, job: Job, folder: Path, world: World) -> None:
    if not stop.pressed:
        return
    if not world.leader:
        raise SystemExit(0)
    raise JobError(
        f"stopped with {done(folder, job):,} of {job.settings.n:,} samples in {folder}; "
        "the same command goes on from there"
    )


def _make(job: Job, flow: Flow, folder: Path, shard: Shard, batch: int, versions: dict[str, str]) -> None:
    """Decode and write one shard, in smaller batches if memory runs out."""
    while True:
        try:
            x, labels, status = draw(job, flow, shard, batch)
            break
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            if batch == 1:
                raise JobError(f"out of memory at sample {shard.first}, even in batches of one") from None
        batch = -(-batch // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    with saying(folder):
        about = {
            "batch": batch,
            "status": dict(status),
            "nonfinite": shard.nonfinite(x),
            "versions": versions,
        }
        finish(folder, shard, shard.encode(x, labels), **about)


@contextmanager
def saying(folder: Path) -> Iterator[None]:
    """What keeps us from writing, in one line."""
    try:
        yield
    except OSError as error:
        raise JobError(
            f"cannot write into {folder}: {error.strerror}; mend that, and the same command goes on"
        ) from None


def draw(job: Job, flow: Flow, shard: Shard, batch: int) -> tuple[Tensor, Tensor | None, Counter[str]]:
    """A shard's samples on the CPU, their labels, and how many ended how.

    A sample that is not finite, be it by denoising, is NaN throughout and counts as NONFINITE.
    """
    ask, parts, status = job.settings, [], Counter[str]()
    options: dict[str, Any] = {"guidance": ask.guide_options()} if ask.guidance else {}
    for first in range(shard.first, shard.first + shard.count, batch):
        count = min(batch, shard.first + shard.count - first)
        labels = turn(ask.labels, first, count)
        z = flow.noise(count, ask.seed, start=first)
        out = flow.decode(z, job.plan, labels=labels, backend=ask.backend, warn=False, **options)
        x = (flow.denoise(out.x, labels=labels) if ask.denoise else out.x).cpu()
        ends = zip(*(b.status for b in out.stats.blocks), nonfinite_rows(x).tolist(), strict=True)
        found = [Status.NONFINITE if lost else max(s, key=lambda s: s.rank) for *s, lost in ends]
        x[torch.tensor([s is Status.NONFINITE for s in found])] = float("nan")
        parts.append(x)
        status.update(s.name for s in found)
    return torch.cat(parts), turn(ask.labels, shard.first, shard.count), status


def _close(job: Job, folder: Path, made: int) -> Outcome:
    """All shards are there: write the sums of all files, in the format of sha256sum."""
    status, nonfinite, smaller = Counter[str](), 0, 0

    def sums(path: str) -> None:
        nonlocal nonfinite, smaller
        with open(path, "w", encoding="utf-8") as f:
            for number in range(job.count):
                record = Record.read(folder, job.part(number))
                if record is None:
                    raise JobError(f"shard {number} of {folder} has gone; the same command makes it again")
                f.writelines(f"{value}  {name}\n" for name, value in record.files.items())
                status.update(record.status)
                nonfinite += len(record.nonfinite)
                smaller += record.batch < job.batch

    with saying(folder):
        write_atomically(folder / SUMS, sums)
        shutil.rmtree(folder / PARTIAL)
    ends = {s.name: status[s.name] for s in STATUSES if status[s.name]}
    return Outcome(job.count, made, ends, nonfinite, smaller)
