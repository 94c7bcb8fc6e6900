"""`jacobiflow analyze`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
import tyro
from torch import Tensor

import jacobiflow
from jacobiflow.cli.options import (
    make_folder,
    note,
    parse,
    parse_labels,
    pick_device,
    refuse_context,
    report,
    table,
)
from jacobiflow.core.processes import World, leave
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis import plots
from jacobiflow_lab.analysis.convergence import convergence
from jacobiflow_lab.analysis.memory import memory
from jacobiflow_lab.analysis.progress import kept, progress
from jacobiflow_lab.analysis.redundancy import OFFSETS, redundancy, variants_of
from jacobiflow_lab.analysis.runtime import Runtime, runtime
from jacobiflow_lab.analysis.sweeps import doubt, sweeps

What = Literal["redundancy", "convergence", "sweeps", "runtime", "memory", "progress"]
WHAT: tuple[What, ...] = get_args(What)
FEW = 8  # samples are enough for curves of convergence


@dataclass(frozen=True)
class Args:
    """Look into a trained flow, layer by layer, as the paper does.

    redundancy masks the nearest predecessors of every position; convergence follows sweeps to the exact
    answer; sweeps counts them; runtime and memory say what layers cost; progress counts sweeps along a
    training run, from the checkpoints that it kept. Each writes NAME.json and pictures into --out. Under
    torchrun, runtime is of several processes that gather their samples in the end.

    example: jacobiflow analyze mnist --labels 0-9 --what sweeps --out look
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A bundled name, a checkpoint folder, a hub id, or the folder of a training run."""
    what: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Of those above. Left out: all, progress for training runs only."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 32
    """How many samples."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Classes, in turn: 3, 0-9 or 1,3,5-7. Left out: no label."""
    o: Annotated[tuple[int, ...], tyro.conf.arg(metavar="O ...")] = OFFSETS
    """redundancy: how many of the nearest predecessors are masked."""
    tol: Annotated[float | None, tyro.conf.arg(metavar="TOL")] = None
    """Largest last update of swept layers. Left out: the model's own."""
    init: Annotated[Literal["zeros", "noise", "previous"] | None, tyro.conf.arg(metavar="INIT")] = None
    """First guess of sweeps: zeros, noise or previous."""
    batch: int = 16
    """Samples at a time, for sweeps, runtime and memory."""
    repeats: int = 3
    """runtime: runs of each plan; their median is shown."""
    seed: int = 0
    """Sample i depends on (seed, i) only."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("out")
    """Folder for what is written."""
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True)
class Job:
    """What every analysis works on."""

    args: Args
    flow: Flow
    source: str
    z: Tensor
    labels: Tensor | None
    out: Path
    world: World

    def condition(self, n: int | None = None) -> dict[str, Any]:
        """Labels of the first n samples."""
        return {} if self.labels is None else {"labels": self.labels[: n or len(self.z)]}

    @property
    def swept(self) -> dict[str, Any]:
        """Options of plans that sweep."""
        return {"tol": self.args.tol, "init": self.args.init}


@dataclass(frozen=True)
class Found:
    """An analysis: plain data, a text, and the files it wrote."""

    doc: dict[str, Any]
    text: str
    files: tuple[str, ...]


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="analyze")
    check(args)
    world = World.from_environment()
    try:
        ready: list[tuple[Job, tuple[str, ...]]] = []
        world.share(lambda: ready.append(prepare(args, world)))
        if world.leader:
            work(*ready[0])
        else:
            time_plans(prepare(args, world)[0])  # all that several processes do
    finally:
        leave()


def prepare(args: Args, world: World) -> tuple[Job, tuple[str, ...]]:
    """The model, the noise and the names of the analyses; whatever is wrong is found here."""
    source, is_run = resolve(args.model)
    names = args.what or tuple(w for w in WHAT if w != "progress" or is_run)
    if "progress" in names and not is_run:
        raise ValueError(
            f"--what progress: {args.model} keeps no checkpoints kept/step-*, as training runs do"
        )
    if world.size > 1 and names != ("runtime",):
        raise ValueError("several processes measure run time only: add --what runtime, or start one process")
    flow = load(source, device=world.device(pick_device(args.device))).requires_grad_(False)
    refuse_context(flow, "jacobiflow_lab.analysis")
    labels = parse_labels(args.labels, args.n, flow.num_classes)
    flow.plan("uniform", tol=args.tol, init=args.init)  # a wrong one is found before any work is done
    make_folder(args.out)
    return Job(args, flow, source, flow.noise(args.n, args.seed), labels, args.out, world), names


def work(job: Job, names: Sequence[str]) -> None:
    """Warn, look, write, report."""
    args, flow = job.args, job.flow
    warning = doubt(sweeps(flow, job.z[:FEW], "uniform", **job.swept, **job.condition(FEW)))
    if warning is not None:
        note(f"jacobiflow analyze: {warning}")
    about = {
        "model": args.model,
        "n": args.n,
        "seed": args.seed,
        "labels": args.labels,
        "threads": torch.get_num_threads(),
        "processes": job.world.size,
        "device": str(job.z.device),
        "warning": warning,
        "versions": {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__},
    }
    found: dict[str, Found] = {}
    for name in names:
        found[name] = ANALYSES[name](job)
        text = json.dumps(about | {name: found[name].doc}, indent=2, allow_nan=False) + "\n"
        (args.out / f"{name}.json").write_text(text, encoding="utf-8")
    files = [f for name in names for f in (f"{name}.json", *found[name].files)]
    doc = about | {name: one.doc for name, one in found.items()} | {"files": files}
    parts = [one.text for one in found.values()]
    report(doc, "\n\n".join([*parts, f"written to {args.out}: {', '.join(files)}"]), as_json=args.json)


def check(args: Args) -> None:
    """What can be wrong whatever the model is."""
    for name in args.what:
        if name not in WHAT:
            raise ValueError(f"--what knows {', '.join(WHAT)}, not {name!r}")
    if min(args.n, args.batch, args.repeats) < 1 or args.seed < 0:
        raise ValueError("-n, --batch and --repeats must be 1 or more, --seed 0 or more")
    if not args.o or min(args.o) < 0:
        raise ValueError("--o takes whole numbers of 0 or more, such as 1 2 5")


def resolve(model: str) -> tuple[str, bool]:
    """The checkpoint to look into, and whether `model` is the folder of a training run."""
    found = kept(model)
    if not found:
        return model, False
    last = Path(model) / "model"
    return str(last if last.is_dir() else found[-1][1]), True


def look_at_redundancy(job: Job) -> Found:
    """Masked generation."""
    found = redundancy(
        job.flow,
        job.z,
        offsets=job.args.o,
        progress=lambda text: note(f"masking: {text}"),
        **job.condition(),
    )
    title = f"{job.args.model}: masked against standard layer outputs"
    plots.save_redundancy(found, job.out / "redundancy.png", title=title)
    files = ["redundancy.png"]
    for variant in variants_of(job.flow):
        name = f"masked-{variant}.png"
        title = f"{job.args.model}: the o nearest predecessors masked ({variant})"
        if plots.save_masked(found, job.out / name, variant=variant, title=title):
            files.append(name)
    head = ("masking", "o", *map(plots.name_of, range(len(job.flow.blocks))))
    rows = [(m.variant, str(m.o), *(f"{d.cosine:.3f} / {d.l2:.3g}" for d in m.layers)) for m in found.masked]
    text = f"cosine similarity / L2 distance, each layer given its exact input, {found.samples} samples"
    return Found(found.to_dict(), f"{text}\n\n{table([head, *rows])}", tuple(files))


def look_at_convergence(job: Job) -> Found:
    """Errors sweep by sweep."""
    few = job.z[:FEW]
    found = convergence(
        job.flow,
        few,
        init=job.args.init,
        double=True,
        progress=lambda text: note(f"convergence: {text}"),
        **job.condition(len(few)),
    )
    plots.save_convergence(found, job.out / "convergence.png", title=f"{job.args.model}: error of each layer")
    plots.save_ratios(found, job.out / "ratios.png", title=f"{job.args.model}: ratio of successive errors")
    head = ("", "error at first", "after 1", "after 2", "after 5", "after 10", "sweeps", "ratio falls")
    rows = [
        (
            plots.name_of(i),
            *(f"{b.jacobi[k]:.3g}" if k < len(b.jacobi) else "" for k in (0, 1, 2, 5, 10)),
            str(len(b.jacobi) - 1),
            {True: "yes", False: "no", None: "too few"}[b.ratio_falls],
        )
        for i, b in enumerate(found.blocks)
    ]
    text = f"L2 distance to the exact answer after sweeps, mean of {found.samples} samples, {found.dtype}"
    return Found(found.to_dict(), f"{text}\n\n{table([head, *rows])}", ("convergence.png", "ratios.png"))


def look_at_sweeps(job: Job) -> Found:
    """Sweeps of the paper's two plans."""
    found = [
        sweeps(
            job.flow,
            job.z,
            plan,
            batch=job.args.batch,
            progress=lambda text, plan=plan: note(f"counting sweeps, {plan}: {text}"),  # type: ignore[misc]
            **job.swept,
            **job.condition(),
        )
        for plan in ("uniform", "selective")
    ]
    plots.save_sweeps(found, job.out / "sweeps.png", title=f"{job.args.model}: sweeps of each layer")
    head = ("plan", "", *map(plots.name_of, range(len(job.flow.blocks))))
    rows = []
    for one in found:
        rows.append((one.plan, "mean", *(f"{s.mean:.1f}" for s in one.layers)))
        rows.append(("", "batch max", *(f"{s.batch_max:.1f}" for s in one.layers)))
    text = f"sweeps, {job.args.n} samples in batches of {min(job.args.batch, job.args.n)}"
    return Found(
        {"plans": [one.to_dict() for one in found]}, f"{text}\n\n{table([head, *rows])}", ("sweeps.png",)
    )


def time_plans(job: Job) -> list[Runtime]:
    """Run time of the paper's plans; of several processes each samples a batch of its own."""
    n = min(job.args.batch, job.args.n)

    def say(plan: str, text: str) -> None:
        if job.world.leader:
            note(f"run time, {plan}: {text}")

    return [
        runtime(
            job.flow,
            n,
            plan,
            repeats=job.args.repeats,
            seed=job.args.seed + job.world.rank,
            options=job.swept if plan != "sequential" else None,
            progress=partial(say, plan),
            **job.condition(n),
        )
        for plan in ("sequential", "uniform", "selective")
    ]


def look_at_runtime(job: Job) -> Found:
    """Seconds of each layer."""
    found = time_plans(job)
    plots.save_runtime(found, job.out / "runtime.png", title=f"{job.args.model}: where the time goes")
    head = ("plan", *map(plots.name_of, range(len(job.flow.blocks))), "other", "total")
    rows = [
        (r.plan, *(f"{x.seconds:.3f}" for x in r.layers), f"{r.other:.3f}", f"{r.total:.3f}") for r in found
    ]
    several = f" on each of {job.world.size} processes" if job.world.size > 1 else ""
    text = (
        f"seconds a batch of {found[0].batch}{several}, median of {job.args.repeats} runs; "
        "other: noise, denoising, communication"
    )
    doc = {"plans": [one.to_dict() for one in found]}
    return Found(doc, f"{text}\n\n{table([head, *rows])}", ("runtime.png",))


def look_at_memory(job: Job) -> Found:
    """Peak memory."""
    n = min(job.args.batch, job.args.n)
    found = memory(
        job.source,
        n=n,
        labels=None if job.labels is None else job.labels[:n].tolist(),
        tol=job.args.tol,
        seed=job.args.seed,
        device=str(job.z.device),
        progress=lambda text: note(f"memory: {text}"),
    )
    plots.save_memory(found, job.out / "memory.png", title=f"{job.args.model}: peak memory of decoding")
    head = ("plan", "cache", "peak MiB")
    rows = [(p.plan, "yes" if p.cache else "no", f"{p.peak / 2**20:.1f}") for p in found.peaks]
    text = f"peak memory of decoding {n} samples beyond what was held before ({found.peaks[0].measure})"
    return Found(found.to_dict(), f"{text}\n\n{table([head, *rows])}", ("memory.png",))


def look_at_progress(job: Job) -> Found:
    """Sweeps along a training run."""
    found = progress(
        job.args.model,
        n=job.args.n,
        seed=job.args.seed,
        labels=lambda classes: parse_labels(job.args.labels, job.args.n, classes),
        device=job.z.device,
        batch=job.args.batch,
        say=lambda text: note(f"progress: {text}"),
        **job.swept,
    )
    plots.save_progress(found, job.out / "progress.png", title=f"{job.args.model}: sweeps along training")
    head = ("step", *map(plots.name_of, range(len(job.flow.blocks))))
    rows = [(str(m.step), *(f"{s.mean:.1f}" for s in m.sweeps.layers)) for m in found.moments]
    text = f"sweeps of each layer, all swept, mean of {job.args.n} samples"
    return Found(found.to_dict(), f"{text}\n\n{table([head, *rows])}", ("progress.png",))


ANALYSES: dict[str, Callable[[Job], Found]] = {
    "redundancy": look_at_redundancy,
    "convergence": look_at_convergence,
    "sweeps": look_at_sweeps,
    "runtime": look_at_runtime,
    "memory": look_at_memory,
    "progress": look_at_progress,
}
