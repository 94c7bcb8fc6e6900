"""`jacobiflow reproduce`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import tyro

from jacobiflow.cli.options import Device, make_folder, parse, pick_device, report
from jacobiflow.core.arguments import as_int
from jacobiflow.core.processes import World
from jacobiflow.core.progress import note
from jacobiflow.core.tables import listing, table, terminal_width
from jacobiflow.training.train import train
from jacobiflow_lab.baselines import train_baseline
from jacobiflow_lab.baselines.training import Kind
from jacobiflow_lab.paper.assets import local_recipe
from jacobiflow_lab.paper.claims import judge_claims, verdict_word
from jacobiflow_lab.paper.models import SCALES, Model
from jacobiflow_lab.paper.paper_items import PAPER_ITEMS
from jacobiflow_lab.paper.registry import choose, every_item
from jacobiflow_lab.paper.report import write_report
from jacobiflow_lab.paper.runner import load_rows, run_items
from jacobiflow_lab.paper.schema import Doc, Item
from jacobiflow_lab.paper.session import Session
from jacobiflow_lab.paper.tables import TABLES, Grid, layout, shows


@dataclass(frozen=True)
class Args:
    """Measure the tables and figures of the paper again, and show ours beside its own.

    Writes ITEM/MODEL.json with its pictures, claims.json and a self-contained report.html into --out.
    Rerun the command to resume: what is there with the same settings is not measured again.
    Rows that need missing data or weights say what is missing.

    example: jacobiflow reproduce --data-dir data --out report
             jacobiflow reproduce sweeps convergence --models mnist
    """

    items: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="[ITEM ...]")] = ()
    """Tables and figures. Default: all. `jacobiflow reproduce list` lists them."""
    scale: Literal["cpu", "paper"] = "cpu"
    """cpu: models that fit a CPU. paper: the paper's models and rules, with a GPU."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("report")
    """Folder for results."""
    models: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Only these models. Default: all of the scale."""
    models_dir: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER ...")] = ()
    """Folders of trained models, one folder per model. They take precedence over the bundled ones."""
    data_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder of the data sets, such as cifar10.npz. Rows that need data are skipped without it."""
    records: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """A published report, such as docs/report: its rows are used where weights are missing."""
    ddim: Annotated[str, tyro.conf.arg(metavar="DDIM")] = ""
    """Weights of DDIM: a diffusers folder or hub id. Default: MODEL-ddim in --models-dir."""
    train_missing: bool = False
    """Train missing models and baselines into --out/trained. This takes hours."""
    samples: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Samples scored per method. Default: the scale's."""
    clip: Annotated[str, tyro.conf.arg(metavar="CLIP")] = ""
    """A CLIP model for CLIP-IQA: a folder in transformers' format or a hub id."""
    guidance: Annotated[float, tyro.conf.arg(metavar="WEIGHT")] = 0.0
    """Annealed guidance of the samples that are scored and shown. Times are without guidance."""
    seed: Annotated[int, tyro.conf.arg(metavar="SEED")] = 0
    """Seed of the noise. Several runs use consecutive seeds."""
    again: bool = False
    """Measure again what is already there."""
    publish: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Also write a copy of report and JSON, pictures in the page, with the licence of AFHQ."""
    device: Device = "auto"
    json: bool = False
    """Print JSON instead of tables."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="reproduce")
    if args.items == ("list",):
        print(listing((name, f"{paper.title} ({paper.shows})") for name, paper in PAPER_ITEMS.items()))
        return
    check(args)
    items = choose(args.items)
    make_folder(args.out)
    session = open_session(args)
    command = shlex.join(["jacobiflow", "reproduce", *argv])
    measured = run_items(session, items, models=args.models, command=command, again=args.again, progress=note)
    docs = load_rows(args.out, list(every_item().values()), session.scale, measured)
    claims = judge_claims(docs)
    page = write_report(args.out, docs, claims)
    if args.publish is not None:
        write_report(args.out, docs, claims, to=args.publish)
    tables = {item.name: [layout(one, docs[item.name], item.name) for one in TABLES[item.name]] for item in items}
    doc: Doc = {
        "out": str(args.out),
        "report": str(page),
        "items": {name: docs[name] for name in tables},
        "tables": {name: [grid.to_dict() for grid in grids] for name, grids in tables.items()},
        "claims": [claim for claim in claims if claim["item"] in tables],
    }
    report(doc, text(items, tables, doc["claims"], page), as_json=args.json)


def check(args: Args) -> None:
    """Reject wrong options before anything is measured."""
    as_int("--seed", args.seed)
    if args.samples is not None:
        as_int("--samples", args.samples, 8)
    scale = SCALES[args.scale]
    known = dict.fromkeys(model for item in every_item().values() for model in item.models(scale))
    for name in args.models:
        if name not in known:
            raise ValueError(f"--models of --scale {args.scale} are {', '.join(known)}, not {name!r}")
    folders = [("--models-dir", folder) for folder in args.models_dir]
    for option, folder in (*folders, ("--data-dir", args.data_dir), ("--records", args.records)):
        if folder is not None and not folder.is_dir():
            raise ValueError(f"{option} {folder} is not a folder")


def open_session(args: Args) -> Session:
    """The session that the options describe."""
    session = Session(
        scale=SCALES[args.scale],
        out=args.out,
        data_dir=args.data_dir,
        models_dirs=args.models_dir,
        records=args.records,
        ddim=args.ddim,
        device=pick_device(args.device),
        seed=args.seed,
        samples=args.samples,
        clip=args.clip,
        guidance=args.guidance,
        note=note,
    )
    if args.train_missing:
        # An interrupted run resumes.
        session.train = lambda model, out: train(local_recipe(session, model), out, session.device, World())
        session.train_baseline = partial(train_generator, session)
    return session


def train_generator(session: Session, kind: Kind, model: Model, out: Path) -> None:
    """Train a baseline on the model's data, for as long as the model is trained."""
    recipe = local_recipe(session, model)
    options = {"flip": recipe.training.flip}
    seconds = 3600 * model.hours
    train_baseline(kind, recipe.data, seconds, out, options=options, device=session.device, progress=note)


def text(items: Sequence[Item], tables: dict[str, list[Grid]], claims: Any, page: Path) -> str:
    """Tables and verdicts for the terminal."""
    parts = []
    for item in items:
        for grid in tables[item.name]:
            note_below = "\n\n" + fill(grid.note, terminal_width(), break_on_hyphens=False) if grid.note else ""
            parts.append(f"{shows(item.name)}. {grid.title}\n{table(grid.texts())}{note_below}")
    lines = [
        (verdict_word(entry), f"{model}: {claim['text']} {entry.get('reason', '')}".rstrip())
        for claim in claims
        for model, entry in claim["models"].items()
    ]
    if lines:
        parts.append(f"claims\n{listing(lines)}")
    parts.append(f"report: {page}")
    return "\n\n".join(parts)
