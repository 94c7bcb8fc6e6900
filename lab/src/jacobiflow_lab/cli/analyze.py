"""`jacobiflow analyze`: a table of studies, each measured by `jacobiflow_lab.analysis`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

import jacobiflow
from jacobiflow.cli import options as cli
from jacobiflow.core.processes import World, leave_process_group
from jacobiflow.core.progress import steps
from jacobiflow.core.tables import table
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis import plots
from jacobiflow_lab.analysis.convergence import Convergence, convergence
from jacobiflow_lab.analysis.exact_blocks import Note
from jacobiflow_lab.analysis.memory import memory
from jacobiflow_lab.analysis.redundancy import OFFSETS, VARIANTS, redundancy
from jacobiflow_lab.analysis.runtime import Runtime, runtime
from jacobiflow_lab.analysis.sweeps import Sweeps, doubt, kept, progress, sweeps

CURVE_SAMPLES = 8  # enough for curves of convergence
BLOCKS = "block ..."  # in a study's head: one column per block


@dataclass(frozen=True)
class Args:
    """Analyze a trained flow, block by block, as the paper does.

    - redundancy: the output of each block with the nearest predecessors masked
    - convergence: the distance to the exact answer after every sweep
    - sweeps: how many sweeps each block needs
    - runtime, memory: what each block costs
    - progress: sweeps along a training run, from the checkpoints that it kept

    Each writes NAME.json and pictures to --out. Under torchrun, runtime measures
    several processes that gather their samples.

    example: jacobiflow analyze mnist --labels 0-9 --what sweeps --out analysis
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A bundled name, a checkpoint folder, a hub id, or the folder of a training run."""
    what: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Names from above. Default: all, but progress for training runs only."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 32
    """Number of samples."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Classes that samples take in turn: 3, 0-9 or 1,3,5-7. Default: no label."""
    o: Annotated[tuple[int, ...], tyro.conf.arg(metavar="O ...")] = OFFSETS
    """redundancy: how many of the nearest predecessors are masked."""
    tol: Annotated[float | None, tyro.conf.arg(metavar="TOL")] = None
    """Tolerance of blocks that are swept. Default: the model's."""
    init: Annotated[Literal["zeros", "noise", "previous"] | None, tyro.conf.arg(metavar="INIT")] = None
    """First guess of sweeps: zeros, noise or previous. Default: the model's."""
    batch: int = 16
    """Samples per batch, for sweeps, runtime and memory."""
    repeats: int = 3
    """runtime: runs per plan; their median is shown."""
    seed: int = 0
    """Seed of the noise. Sample i depends on (seed, i) only."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("out")
    """Folder for JSON and pictures."""
    force: cli.Force = False
    json: bool = False
    """Print JSON instead of tables."""


@dataclass(frozen=True)
class Job:
    """What every study works on."""

    args: Args
    studies: tuple[str, ...]
    source: str
    flow: Flow
    z: Tensor
    labels: Tensor | None
    world: World

    @property
    def batch(self) -> int:
        """Samples per batch."""
        return min(self.args.batch, self.args.n)

    @property
    def swept(self) -> dict[str, Any]:
        """Options of plans that sweep."""
        return {"tol": self.args.tol, "init": self.args.init}

    def first(self, n: int) -> dict[str, Any]:
        """Noise and labels of the first n samples."""
        return {"z": self.z[:n], "labels": None if self.labels is None else self.labels[:n]}


@dataclass(frozen=True)
class Study:
    """What is measured, how it is drawn, and the table of it.

    measure: a record of `jacobiflow_lab.analysis`, or a list of records, one per plan.
    pictures: (file, function that draws it and returns False if there is nothing to draw, title).
    about: the sentence above the table, a template. head, rows: of the table; BLOCKS is one column per block.
    """

    measure: Callable[[Job, Note], Any]
    pictures: Sequence[tuple[str, Callable[..., Any], str]]
    about: str
    head: Sequence[str]
    rows: Callable[[Any], list[tuple[str, ...]]]


def sweeps_by_plan(job: Job, say: Note) -> list[Sweeps]:
    """Sweeps of the paper's two plans."""
    options = job.swept | {"batch": job.args.batch, "labels": job.labels}
    return [
        sweeps(job.flow, job.z, plan, progress=partial(say_of_plan, say, plan), **options)
        for plan in ("uniform", "selective")
    ]


def runtime_by_plan(job: Job, say: Note) -> list[Runtime]:
    """Run time of the paper's plans; of several processes each samples a batch of its own."""
    shared: dict[str, Any] = {"repeats": job.args.repeats, "seed": job.args.seed + job.world.rank}
    shared["labels"] = job.first(job.batch)["labels"]
    plans = {"sequential": {}, "uniform": job.swept, "selective": job.swept}
    return [
        runtime(
            job.flow, job.batch, plan, options=options, progress=partial(say_of_plan, say, plan), **shared
        )
        for plan, options in plans.items()
    ]


def say_of_plan(say: Note, plan: str, text: str) -> None:
    """Report progress with a plan."""
    say(f"{plan}, {text}")


def convergence_rows(result: Convergence) -> list[tuple[str, ...]]:
    """Errors after a few numbers of sweeps."""
    falls = {True: "yes", False: "no", None: "too few"}
    rows = []
    for i, b in enumerate(result.blocks):
        errors = [f"{b.jacobi[k]:.3g}" if k < len(b.jacobi) else "" for k in (0, 1, 2, 5, 10)]
        rows.append((plots.block_name(i), *errors, str(len(b.jacobi) - 1), falls[b.ratio_falls]))
    return rows


def sweeps_rows(result: list[Sweeps]) -> list[tuple[str, ...]]:
    """Mean and batch maximum per plan."""
    rows = []
    for plan in result:
        rows.append((plan.plan, "mean", *(f"{s.mean:.1f}" for s in plan.layers)))
        rows.append(("", "batch max", *(f"{s.batch_max:.1f}" for s in plan.layers)))
    return rows


STUDIES = {
    "redundancy": Study(
        lambda job, say: redundancy(job.flow, job.z, offsets=job.args.o, labels=job.labels, progress=say),
        [
            ("redundancy.png", plots.save_redundancy, "masked against standard block outputs"),
            *(
                (
                    f"masked-{v}.png",
                    partial(plots.save_masked, variant=v),
                    f"o nearest predecessors masked ({v})",
                )
                for v in VARIANTS
            ),
        ],
        "cosine similarity / L2 distance, each block given its exact input, {result.samples} samples",
        ("masking", "o", BLOCKS),
        lambda result: [
            (m.variant, str(m.o), *(f"{d.cosine:.3f} / {d.l2:.3g}" for d in m.layers)) for m in result.masked
        ],
    ),
    "convergence": Study(
        lambda job, say: convergence(
            job.flow, init=job.args.init, double=True, progress=say, **job.first(CURVE_SAMPLES)
        ),
        [
            ("convergence.png", plots.save_convergence, "error of each block"),
            ("ratios.png", plots.save_ratios, "ratio of successive errors"),
        ],
        "L2 distance to the exact answer after sweeps, mean of {result.samples} samples, {result.dtype}",
        ("", "error at first", "after 1", "after 2", "after 5", "after 10", "sweeps", "ratio falls"),
        convergence_rows,
    ),
    "sweeps": Study(
        sweeps_by_plan,
        [("sweeps.png", plots.save_sweeps, "sweeps of each block")],
        "sweeps, {job.args.n} samples in batches of {job.batch}",
        ("plan", "", BLOCKS),
        sweeps_rows,
    ),
    "runtime": Study(
        runtime_by_plan,
        [("runtime.png", plots.save_runtime, "where the time goes")],
        "seconds per batch of {job.batch}, median of {job.args.repeats} runs, processes: {job.world.size}; "
        "other: noise, denoising, communication",
        ("plan", BLOCKS, "other", "total"),
        lambda result: [
            (r.plan, *(f"{seconds:.3f}" for seconds in (*(x.seconds for x in r.layers), r.other, r.total)))
            for r in result
        ],
    ),
    "memory": Study(
        lambda job, say: memory(
            job.source,
            n=job.batch,
            labels=None if job.labels is None else job.labels[: job.batch].tolist(),
            tol=job.args.tol,
            seed=job.args.seed,
            device=str(job.z.device),
            progress=say,
        ),
        [("memory.png", plots.save_memory, "peak memory of decoding")],
        "peak memory of decoding {result.batch} samples beyond what was held before "
        "({result.peaks[0].measure})",
        ("plan", "cache", "peak MiB"),
        lambda result: [(p.plan, "yes" if p.cache else "no", f"{p.peak / 2**20:.1f}") for p in result.peaks],
    ),
    "progress": Study(
        lambda job, say: progress(
            job.args.model,
            n=job.args.n,
            seed=job.args.seed,
            labels=lambda classes: cli.parse_labels(job.args.labels, job.args.n, classes),
            device=job.z.device,
            batch=job.args.batch,
            say=say,
            **job.swept,
        ),
        [("progress.png", plots.save_progress, "sweeps along training")],
        "sweeps of each block, all swept, mean of {job.args.n} samples",
        ("step", BLOCKS),
        lambda result: [(str(m.step), *(f"{s.mean:.1f}" for s in m.sweeps.layers)) for m in result.moments],
    ),
}


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = cli.parse(Args, argv, command="analyze")
    world = World.from_environment()
    try:
        leaders: list[Job] = []
        world.share(lambda: leaders.append(prepare(args, world)))  # mistakes are reported once
        if world.leader:
            work(leaders[0])
        else:
            runtime_by_plan(prepare(args, world), lambda text: None)  # the only study of several processes
    finally:
        leave_process_group()


def prepare(args: Args, world: World) -> Job:
    """The model, the noise and the names of the studies. Checks all options before any work."""
    for name in args.what:
        if name not in STUDIES:
            raise ValueError(f"--what knows {', '.join(STUDIES)}, not {name!r}")
    if min(args.n, args.batch, args.repeats) < 1 or args.seed < 0:
        raise ValueError("-n, --batch and --repeats must be 1 or more, --seed 0 or more")
    if not args.o or min(args.o) < 0:
        raise ValueError("--o takes whole numbers of 0 or more, such as 1 2 5")
    checkpoints, source = kept(args.model), args.model
    if checkpoints:  # the folder of a training run
        last = Path(args.model) / "model"
        source = str(last if last.is_dir() else checkpoints[-1][1])
    studies = args.what or tuple(name for name in STUDIES if name != "progress" or checkpoints)
    if "progress" in studies and not checkpoints:
        raise ValueError(
            f"--what progress: {args.model} keeps no checkpoints kept/step-*, as training runs do"
        )
    if world.size > 1 and studies != ("runtime",):
        raise ValueError("several processes measure run time only: add --what runtime, or start one process")
    flow = load(source, device=world.device(cli.pick_device(args.device))).requires_grad_(False)
    cli.refuse_context(flow, "jacobiflow_lab.analysis")
    labels = cli.parse_labels(args.labels, args.n, flow.num_classes)
    flow.plan("uniform", tol=args.tol, init=args.init)  # raises if tol is wrong
    cli.make_folder(args.out, [f"{name}.json" for name in studies], force=args.force)
    return Job(args, studies, source, flow, flow.noise(args.n, args.seed), labels, world)


def work(job: Job) -> None:
    """Warn, measure, write and report."""
    args = job.args
    warning = doubt(sweeps(job.flow, plan="uniform", **job.first(CURVE_SAMPLES), **job.swept))
    if warning is not None:
        cli.note(f"jacobiflow analyze: {warning}")
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
    blocks = [plots.block_name(i) for i in range(len(job.flow.blocks))]
    doc, texts, files = dict(about), [], []
    for name in job.studies:
        study = STUDIES[name]
        with steps(f"{name}:") as show:
            result = study.measure(job, show)
        doc[name] = (
            {"plans": [plan.to_dict() for plan in result]} if isinstance(result, list) else result.to_dict()
        )
        text = json.dumps(about | {name: doc[name]}, indent=2, allow_nan=False) + "\n"
        cli.remove_old(args.out, [file for file, *_ in study.pictures])
        (args.out / f"{name}.json").write_text(text, encoding="utf-8")
        files.append(f"{name}.json")
        for file, draw, title in study.pictures:
            if draw(result, args.out / file, title=f"{args.model}: {title}") is not False:
                files.append(file)
        head = [name for column in study.head for name in (blocks if column == BLOCKS else [column])]
        texts.append(f"{study.about.format(job=job, result=result)}\n\n{table([head, *study.rows(result)])}")
    texts.append(f"written to {args.out}: {', '.join(files)}")
    cli.report(doc | {"files": files}, "\n\n".join(texts), as_json=args.json)
