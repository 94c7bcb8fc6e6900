"""`jacobiflow reproduce`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import tyro

from jacobiflow.cli.options import listing, make_folder, note, parse, pick_device, report, table
from jacobiflow.cli.train import train
from jacobiflow.core.processes import World
from jacobiflow.training.recipe import Recipe
from jacobiflow_lab.baselines import train_baseline
from jacobiflow_lab.baselines.training import Kind
from jacobiflow_lab.paper.claims import judge_claims, verdict_word
from jacobiflow_lab.paper.item import Doc, Item, cell_text
from jacobiflow_lab.paper.models import SCALES, Model
from jacobiflow_lab.paper.publish import conclude
from jacobiflow_lab.paper.registry import ITEMS, choose
from jacobiflow_lab.paper.runner import load_all, run_items
from jacobiflow_lab.paper.workshop import Workshop


@dataclass(frozen=True)
class Args:
    """Measure every table and figure of the paper again, and set ours beside its own.

    Writes ITEM/MODEL.json with its pictures, claims.json and a self-contained report.html into --out.
    What is there with the same settings is not measured again: the same command goes on where it was.
    Rows that need data or weights that are not there say so.

    example: jacobiflow reproduce --data-dir ../shared/data --out out/paper
             jacobiflow reproduce sweeps convergence --models mnist
    """

    items: tyro.conf.Positional[tuple[str, ...]] = ()
    """Which tables and figures; left out: all. `jacobiflow reproduce list` lists them."""
    scale: Literal["cpu", "paper"] = "cpu"
    """cpu: small models, an hour on two cores. paper: the paper's models and rules, with a GPU."""
    out: Path = Path("out/paper")
    """Folder for what is written."""
    models: tuple[str, ...] = ()
    """Only these models. Left out: all of the scale."""
    models_dir: tuple[Path, ...] = ()
    """Folders of trained models, one folder a model; they come before the bundled ones."""
    data_dir: Path = Path("../shared/data")
    """Folder of the data sets."""
    records: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = Path("docs/report")
    """A published report: what it says stands where weights are missing. None: rows say what is missing."""
    ddim: str = ""
    """Weights of DDIM: a diffusers folder or hub id. Left out: MODEL-ddim in --models-dir."""
    train_missing: bool = False
    """Train models and baselines that are not there, into --out/trained. This takes hours."""
    samples: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Samples judged for each method. Left out: the scale's."""
    clip: str = ""
    """A CLIP for CLIP-IQA: a folder in transformers' format or a hub id."""
    guidance: float = 0.0
    """Annealed guidance of the samples that are judged and shown. Times are without."""
    seed: int = 0
    """Of the noise; runs take this one and those after it."""
    again: bool = False
    """Measure what is there already, too."""
    publish: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Copy report and JSON there, without pictures that may not be handed on."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    json: bool = False
    """Print JSON instead of tables."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="reproduce")
    if args.items == ("list",):
        print(listing((item.name, f"{item.title} ({item.shows})") for item in ITEMS.values()))
        return
    check(args)
    items = choose(args.items)
    make_folder(args.out)
    device = pick_device(args.device)
    shop = Workshop(
        scale=SCALES[args.scale],
        out=args.out,
        data_dir=args.data_dir,
        models_dirs=args.models_dir,
        records=args.records,
        ddim=args.ddim,
        device=device,
        seed=args.seed,
        samples=args.samples,
        clip=args.clip,
        guidance=args.guidance,
        train=partial(train_model, args) if args.train_missing else None,
        train_baseline=partial(train_generator, args) if args.train_missing else None,
        note=note,
    )
    command = shlex.join(["jacobiflow", "reproduce", *argv])
    run_items(shop, items, models=args.models, command=command, again=args.again, say=note)
    every = list(ITEMS.values())
    docs = load_all(args.out, every, shop.scale)
    claims = judge_claims(docs)
    page = conclude(args.out, every, docs, claims)
    if args.publish is not None:
        conclude(args.out, every, docs, claims, to=args.publish)
    doc = {
        "out": str(args.out),
        "report": str(page),
        "items": {item.name: docs[item.name] for item in items},
        "claims": [c for c in claims if c["item"] in {item.name for item in items}],
    }
    report(doc, text(items, docs, doc["claims"], page), as_json=args.json)


def check(args: Args) -> None:
    """What can be wrong before anything is measured."""
    if args.samples is not None and args.samples < 8:
        raise ValueError(f"--samples must be 8 or more, not {args.samples}")
    if args.seed < 0:
        raise ValueError(f"--seed must be 0 or more, not {args.seed}")
    scale = SCALES[args.scale]
    known = dict.fromkeys(model for item in ITEMS.values() for model in item.models(scale))
    for name in args.models:
        if name not in known:
            raise ValueError(f"--models of --scale {args.scale} are {', '.join(known)}, not {name!r}")
    for folder in args.models_dir:
        if not folder.is_dir():
            raise ValueError(f"--models-dir {folder} is no folder")


def recipe_of(args: Args, model: Model) -> Recipe:
    """The recipe, with its data where they are."""
    recipe = Recipe.load(model.recipe)
    local = args.data_dir / recipe.data.source
    if recipe.data.source and local.exists():
        recipe = replace(recipe, data=replace(recipe.data, source=str(local)))
    return recipe


def train_model(args: Args, model: Model, out: Path) -> None:
    """A model by its recipe; a run that was cut short goes on."""
    train(recipe_of(args, model), out, pick_device(args.device), World())


def train_generator(args: Args, kind: Kind, model: Model, out: Path) -> None:
    """A baseline on the model's data, for as long as the model is trained."""
    recipe = recipe_of(args, model)
    train_baseline(
        kind,
        recipe.data,
        3600 * model.hours,
        out,
        options={"flip": recipe.training.flip},
        device=pick_device(args.device),
        progress=note,
    )


def text(items: Sequence[Item], docs: dict[str, dict[str, Doc]], claims: Any, page: Path) -> str:
    """Tables for people."""
    parts = []
    for item in items:
        for one in item.tables(docs[item.name]):
            rows = [[cell_text(cell, docs[item.name]) for cell in row] for row in one.rows]
            said = "\n\n" + fill(one.note, 100) if one.note else ""
            parts.append(f"{item.title} ({item.shows}). {one.title}\n{table([one.head, *rows])}{said}")
    lines = [
        f"  {verdict_word(entry):<14}  {model}: {claim['text']}"
        for claim in claims
        for model, entry in claim["models"].items()
    ]
    if lines:
        parts.append("claims\n" + "\n".join(lines))
    parts.append(f"report: {page}")
    return "\n\n".join(parts)
