"""`jacobiflow sample` as a job: many samples in shards, on one process or many."""

from __future__ import annotations

import math
import os
import shutil
import warnings
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from jacobiflow import __version__
from jacobiflow.cli.options import label_cycle, note, pick_device, report
from jacobiflow.cli.sample import Args, check_model, exit_status
from jacobiflow.core.hardware import refuse
from jacobiflow.core.locks import Lock
from jacobiflow.core.plan import Plan
from jacobiflow.core.processes import World, leave
from jacobiflow.data.pictures import as_images
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import PLANS, Flow
from jacobiflow.flows.nonfinite import remedy
from jacobiflow.jobs.batch import find_batch, find_shard, size
from jacobiflow.jobs.manifest import Job, JobError, Settings, fingerprint, versions
from jacobiflow.jobs.progress import done
from jacobiflow.jobs.runner import Outcome, clear, refuse_others, run
from jacobiflow.jobs.shards import RECORDS, turn

LARGEST, LARGEST_SHARD, MOST_THREADS = 10**9, 10**5, 1024


def check(args: Args) -> None:
    """What can be wrong with a job whatever the model is."""
    if len(args.plan) > 1 or args.time_at or args.repeats > 1:
        raise ValueError("a job (--format) has one --plan, and neither --time-at nor --repeats")
    if args.n > LARGEST:
        raise ValueError(f"-n {args.n}: a job has at most {LARGEST:,} samples, use several seeds for more")
    for name in ("batch", "shard", "threads"):
        value = getattr(args, name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"--{name} must be 1 or more, not {value}")
    for name, most in (("shard", LARGEST_SHARD), ("threads", MOST_THREADS)):
        if (getattr(args, name) or 0) > most:
            raise ValueError(f"--{name} must be {most:,} or less, not {getattr(args, name)}")


def main(args: Args) -> int:
    """Run the job of these options, or go on with it; the exit status is 1 if samples are not finite."""
    check(args)
    world = World.from_environment()
    try:
        return work(args, world, world.device(pick_device(args.device)))
    finally:
        leave()


def work(args: Args, world: World, device: torch.device) -> int:
    """What each process does: the first one settles what is to be done, then all do their share."""
    with ExitStack() as held:
        lead = Leader(args, device, world.near, held)
        job = world.share(lead.prepare)
        flow = lead.flow if world.leader else follow(args, job, device, held)
        if world.leader:
            announce(args, job, world, device)
        outcome = run(job, flow, args.out, world, versions(device, __version__))
    if outcome is None:
        return 0
    tell(args, job, outcome)
    advice = remedy(job.settings.guidance, next(flow.parameters()).dtype)
    return exit_status("sample", outcome.nonfinite, job.settings.n, advice)


def announce(args: Args, job: Job, world: World, device: torch.device) -> None:
    """What is about to be done, by how many."""
    threads, cores = job.settings.threads, os.cpu_count() or 1
    note(
        f"{job.settings.n:,} samples in {job.count:,} shards of {job.shard:,}, batches of {job.batch}, on "
        f"{world.size} x {device.type} with {threads} thread{'s' * (threads > 1)}, into {args.out}"
    )
    if device.type == "cpu" and cores >= 2 * world.near * threads:
        many = f"torchrun --nproc-per-node {cores // threads} -m jacobiflow.cli.main sample ..."
        note(f"this machine has {cores} cores: `{many}` uses them all and draws the same samples")


class Leader:
    """The first process."""

    flow: Flow

    def __init__(self, args: Args, device: torch.device, near: int, held: ExitStack) -> None:
        self.args, self.device, self.near, self.held = args, device, near, held

    def prepare(self) -> Job:
        """Load the model, lock the folder, and find the job there or begin a new one."""
        args, folder = self.args, self.args.out
        old = Job.load(folder)
        pinned = old.revision if old is not None and old.model == args.model else None
        self.flow = load(args.model, revision=pinned, device=self.device)
        asked = settings(args, self.flow)  # whatever the user has to mend is found before a folder is made
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = self.held.enter_context(Lock(folder))
            lock.alone()
            clear(folder)
            old = Job.load(folder)
            job = self.begin(asked) if old is None else self.resume(old, asked)
            lock.together()
        except OSError as error:
            raise JobError(f"--out {folder} cannot be written to: {error.strerror}") from None
        return job

    def begin(self, asked: Settings) -> Job:
        """A new job: what was left open is settled now, for good."""
        args, flow = self.args, self.flow
        torch.set_num_threads(asked.threads)
        batch = min(asked.batch or find_batch(flow, asked, self.near), asked.n)
        shard = asked.shard or find_shard(flow, asked, batch)
        batch = min(batch, shard)
        refuse(f"a shard of {shard} samples", 3 * shard * size(flow), "use a smaller --shard")
        job = Job(
            settings=asked,
            model=args.model,
            plan=resolve(args.plan[0], flow, asked, batch),
            batch=batch,
            shard=shard,
            weights=fingerprint(flow),
            dtype=str(next(flow.parameters()).dtype).removeprefix("torch."),
            versions=versions(self.device, __version__),
            revision=flow.revision,
        ).signed()
        refuse_others(job, args.out, new=True)
        room(flow, job, args.out)
        job.save(args.out)
        return job

    def resume(self, old: Job, asked: Settings) -> Job:
        """The job that is there, if it is the one that is asked for."""
        old.compare(asked, fingerprint(self.flow), self.args.out)
        refuse_others(old, self.args.out, new=False)
        own = versions(self.device, __version__)
        changed = [f"{k} {v}, now {own.get(k)}" for k, v in old.versions.items() if own.get(k) != v]
        if changed:
            warnings.warn(
                f"the job began with {'; '.join(changed)}: the last digits of new samples may differ",
                stacklevel=2,
            )
        room(self.flow, old, self.args.out)
        return old


def follow(args: Args, job: Job, device: torch.device, held: ExitStack) -> Flow:
    """The flow of the job that the first process has settled, for another process."""
    flow = load(args.model, revision=job.revision, device=device)
    if fingerprint(flow) != job.weights:
        raise JobError(f"{args.model} is another model here than where the first process runs")
    held.enter_context(Lock(args.out)).together()
    return flow


def settings(args: Args, flow: Flow) -> Settings:
    """What the options ask for, checked against the model."""
    check_model(args, flow)
    name = args.plan[0]
    found = Settings(
        n=args.n,
        seed=args.seed,
        labels=label_cycle(args.labels, flow.num_classes),
        plan=name if name in PLANS else flow.plan(name).to_json(),
        tol=args.tol,
        init=args.init,
        guidance=args.guidance,
        guide=args.guide,
        annealed=args.annealed,
        attn_temp=args.attn_temp,
        denoise=args.denoise,
        format=args.format or "npz",
        device=next(flow.parameters()).device.type,
        threads=args.threads or 1,
        batch=0 if args.batch == "auto" else args.batch,
        shard=args.shard or 0,
        backend=args.backend,
    )
    with torch.no_grad():  # raises if this flow does not take them
        flow.bound_blocks(1, guidance=found.guide_options(), backend=args.backend)
    if name != "auto":
        resolve(name, flow, found, 1)
    if found.format == "png" and as_images(torch.zeros(1, *flow.data_shape)) is None:
        raise ValueError(f"--format png: samples of shape {list(flow.data_shape)} are no pictures, use npz")
    return found


def resolve(name: str, flow: Flow, asked: Settings, batch: int) -> Plan:
    """The plan of that name or file; "auto" is tuned for the batches that will be decoded."""
    if name != "auto":
        return flow.plan(name, tol=asked.tol, init=asked.init)
    labels, guide = turn(asked.labels, 0, batch), asked.guide_options()
    given: dict[str, Any] = {"n": batch, "labels": labels, "guidance": guide}
    return flow.plan(name, **given)


def room(flow: Flow, job: Job, folder: Path) -> None:
    """Refuse what the disk cannot hold."""
    each = size(flow)
    if job.settings.format == "png":
        each = math.prod(flow.data_shape) // 10  # as small as packed pixels may get
    need, free = each * (job.settings.n - done(folder, job)), shutil.disk_usage(folder).free
    if need > free:
        raise JobError(
            f"-n {job.settings.n} needs {need / 1e9:,.1f} GB more in {folder}, the disk has "
            f"{free / 1e9:,.1f} GB: make room, or draw fewer"
        )


def tell(args: Args, job: Job, outcome: Outcome) -> None:
    """What there is now."""
    doc = {"model": job.model, "out": str(args.out), "batch": job.batch, "shard": job.shard}
    doc |= asdict(outcome) | {"settings": asdict(job.settings)}
    made = f"{outcome.made:,} of them made now" if outcome.made else "all of them found whole"
    counts = ", ".join(f"{count:,} {name.lower()}" for name, count in outcome.status.items())
    lines = [f"{job.settings.n:,} samples in {outcome.shards:,} shards of {args.out}, {made}", counts]
    if outcome.nonfinite:
        what = "has no PNG" if job.settings.format == "png" else "is NaN in its shard"
        lines.append(f'a nonfinite sample {what}; its record in {RECORDS} lists it under "nonfinite"')
    if outcome.smaller:
        lines.append(f"memory ran out in {outcome.smaller:,} shards: their records give the smaller batches")
    report(doc, "\n".join(lines), as_json=args.json)
