"""`jacobiflow analyze`: the items of `reproduce` that are about one flow, on any checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import torch
import tyro

import jacobiflow
from jacobiflow.cli import options as cli
from jacobiflow.core import tables
from jacobiflow.core.processes import World, leave_process_group
from jacobiflow.core.progress import steps
from jacobiflow.core.records import as_json
from jacobiflow.core.tables import did_you_mean
from jacobiflow.flows.checkpoint import load
from jacobiflow_lab.analysis.redundancy import OFFSETS
from jacobiflow_lab.analysis.sweeps import kept
from jacobiflow_lab.paper import convergence, costs, redundancy, timing, undertrained
from jacobiflow_lab.paper.models import Scale
from jacobiflow_lab.paper.sampling import PAPER_METHODS
from jacobiflow_lab.paper.session import Session, Task
from jacobiflow_lab.paper.tables import TABLES, layout


@dataclass(frozen=True)
class Args:
    """Analyze a trained flow, block by block.

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
    n: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")] = 32
    """Number of samples."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Classes that samples take in turn: 3, 0-9 or 1,3,5-7. Default: no label."""
    o: Annotated[tuple[int, ...], tyro.conf.arg(metavar="O ...")] = OFFSETS
    """redundancy: how many of the nearest predecessors are masked."""
    tol: Annotated[float | None, tyro.conf.arg(metavar="TOL")] = None
    """Tolerance of blocks that are swept. Default: the model's."""
    init: Annotated[Literal["zeros", "noise", "previous"] | None, tyro.conf.arg(metavar="INIT")] = None
    """First guess of sweeps: zeros, noise or previous. Default: the model's."""
    batch: Annotated[int, tyro.conf.arg(metavar="BATCH")] = 16
    """Samples per batch, for sweeps, runtime and memory."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 3
    """runtime: batches per plan; their mean is shown."""
    seed: cli.Seed = 0
    device: cli.Device = "auto"
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("out")
    """Folder for JSON and pictures."""
    force: cli.Force = False
    json: bool = False
    """Print JSON instead of tables."""


STUDIES = {
    "redundancy": redundancy.ITEM,
    "convergence": convergence.ITEM,
    "sweeps": costs.SWEEPS,
    "runtime": timing.ITEM,
    "memory": costs.MEMORY,
    "progress": undertrained.ITEM,
}


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = cli.parse(Args, argv, command="analyze")
    world = World.from_environment()
    try:
        leaders: list[tuple[Task, tuple[str, ...]]] = []
        world.share(lambda: leaders.append(prepare(args, world)))  # mistakes are reported once
        if world.leader:
            work(args, world, *leaders[0])
        else:
            task, _ = prepare(args, world)
            timing.measure(task)  # the only study of several processes
    finally:
        leave_process_group()


def prepare(args: Args, world: World) -> tuple[Task, tuple[str, ...]]:
    """The model with its settings, and the names of the studies. Checks all options before any work."""
    for name in args.what:
        if name not in STUDIES:
            hint = did_you_mean(name, STUDIES)
            raise ValueError(f"--what knows {', '.join(STUDIES)}, not {name!r}{hint}")
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
            f"--what progress: {args.model} keeps no checkpoints kept/step-*: train with --training.keep-every"
        )
    if world.size > 1 and studies != ("runtime",):
        raise ValueError("several processes measure run time only: add --what runtime, or start one process")
    flow = load(source, device=world.device(cli.pick_device(args.device))).requires_grad_(False)
    cli.refuse_context(flow, "jacobiflow_lab.analysis")
    labels = cli.label_cycle(args.labels, flow.num_classes, flow.class_names)
    flow.plan("uniform", tol=args.tol, init=args.init)  # raises if tol is wrong
    cli.make_folder(args.out, [f"{name}.json" for name in studies], force=args.force)
    batch = min(args.batch, args.n)
    scale = Scale(
        name="cpu",
        images=(),
        batches=(batch,),
        repeats=args.repeats,
        runs=1,
        backends=(None,),
        methods=PAPER_METHODS,
        analysed=args.n,
        swept=args.n,
        memory_batch=batch,
        tau=args.tol,
        inits=(args.init,),
        offsets=args.o,
    )
    session = Session(
        scale=scale,
        out=args.out,
        device=next(flow.parameters()).device,
        seed=args.seed + (world.rank if world.size > 1 else 0),
        labels=labels,
        features=False,
    )
    run = Path(args.model) if checkpoints else None
    return Task(session, args.model, args.out, flow=flow, run=run, prefix=""), studies


def work(args: Args, world: World, task: Task, studies: tuple[str, ...]) -> None:
    """Measure, write and report."""
    about = {
        "model": args.model,
        "n": args.n,
        "seed": args.seed,
        "labels": args.labels,
        "threads": torch.get_num_threads(),
        "processes": world.size,
        "device": str(task.device),
        "versions": {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__},
    }
    doc, texts, files = dict(about), [], []
    for i, name in enumerate(studies):
        item = STUDIES[name]
        for old in args.out.glob(f"{name}*.png"):
            old.unlink()
        with steps("analyzing") as show:
            task.session.note = partial(say, show, name)
            show(f"{name}, study {i + 1} of {len(studies)}")
            result = item.run(task)
        doc[name] = as_json(result.data)
        text = json.dumps(about | {name: doc[name]}, indent=2, allow_nan=False) + "\n"
        (args.out / f"{name}.json").write_text(text, encoding="utf-8")
        files += [f"{name}.json", *(picture.file for picture in result.pictures)]
        texts += [f"{name}{text}" for text in shown(item.name, doc[name])]
    written = fill(f"written to {args.out}: {', '.join(files)}", tables.terminal_width(), break_on_hyphens=False)
    cli.report(doc | {"files": files}, "\n\n".join([*texts, written]), as_json=args.json)


def say(show: Callable[[str], None], study: str, text: str) -> None:
    """Show a step of a study; each is a line where there is no terminal."""
    show(f"{study}, {text.replace(': ', ', ')}")


def shown(item: str, data: Any) -> Iterator[str]:
    """What is printed of an item: its tables for one model, which the column of models would only repeat."""
    for table in TABLES[item]:
        grid = layout(replace(table, paper=""), {"": {"data": data}})
        if grid.rows:
            title = table.title.partition(": ")[2] or table.section
            rows = tables.table([row[1:] for row in grid.texts()])
            note = fill(grid.note, tables.terminal_width(), break_on_hyphens=False)
            yield f"{title and ': ' + title}\n\n{rows}\n\n{note}".rstrip()
