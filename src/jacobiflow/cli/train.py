"""`jacobiflow train`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import tyro

from jacobiflow.cli.options import Device, Folder, arg, parse, pick_device
from jacobiflow.core.processes import World, leave_process_group
from jacobiflow.core.tables import listing
from jacobiflow.data.sources import DataConfig, survey
from jacobiflow.training.log import entries
from jacobiflow.training.recipe import Recipe, TrainingConfig, recipe_for, recipe_names
from jacobiflow.training.train import train

Model = TypeVar("Model")


@dataclass(frozen=True, kw_only=True)
class Args(Generic[Model]):
    """Train a flow. Every field of the recipe is a flag.

    A run writes into --out:
    - state.safetensors: after a crash, Ctrl-C or SIGTERM, rerun to resume
    - log.jsonl: loss, validation and rate; samples/: grids of samples
    - model/: the trained flow; kept/: earlier ones (--training.keep-every)

    example: jacobiflow train mnist-cpu --data.source mnist.npz --training.epochs 2
             jacobiflow train --images photos --out runs/photos
    """

    model: Model
    data: DataConfig
    training: TrainingConfig = field(default_factory=TrainingConfig)
    out: Folder = Path("runs/flow")  # Folder of the run.
    device: Device = "auto"
    json: Annotated[tyro.conf.FlagCreatePairsOff[bool], arg(help_behavior_hint="")] = False
    """At the end, print the last logged values and the path of the model as JSON."""


def usage() -> str:
    """The text of `jacobiflow train --help`. Further flags depend on the recipe."""
    names = listing((name, Recipe.load(name).about) for name in recipe_names())
    return f"""usage: jacobiflow train RECIPE [options]
   or: jacobiflow train --images FOLDER [options]

--images infers a recipe from images: a folder, an .npz file or a dataset id.
RECIPE is a TOML file or one of
{names}

`jacobiflow train RECIPE --help` lists all options.

example:
  jacobiflow train mnist-cpu --data.source mnist.npz --out runs/mnist
on 8 GPUs of one machine:
  torchrun --nproc-per-node 8 -m jacobiflow.cli.main train cifar10-paper"""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return
    infer = argv[0] == "--images"
    if infer and (len(argv) < 2 or argv[1].startswith("-")):
        raise ValueError("--images takes a folder of images, an .npz file or a dataset id")
    command, rest = argv[: 1 + infer], argv[1 + infer :]
    if not infer and argv[0] not in recipe_names() and Path(argv[0]).suffix != ".toml" and Path(argv[0]).exists():
        raise ValueError(f"{argv[0]} is not a recipe: to train on its images, use --images {argv[0]}")
    if {arg.split("=")[0] for arg in rest} & {"--steps", "--training.steps"}:
        raise ValueError("no option takes steps: --training.epochs takes passes over the images, such as 0.5 or 20")
    recipe, data = recipe_for(argv[1], pick_device("auto")) if infer else (Recipe.load(argv[0]), None)
    out = Path("runs") / Path(command[-1]).stem
    default = Args(model=recipe.model, data=recipe.data, training=recipe.training, out=out)
    kind: Any = Args
    args = parse(kind[type(recipe.model)], rest, command=f"train {' '.join(command)}", default=default)
    if data is not None and args.data != recipe.data:
        data = survey(args.data)
    recipe = Recipe(model=args.model, data=args.data, training=args.training, about=recipe.about)
    world = World.from_environment()
    try:
        train(recipe, args.out, pick_device(args.device), world, data)
        if args.json and world.leader:
            doc = {"out": str(args.out), "model": str(args.out / "model"), **entries(args.out)[-1]}
            print(json.dumps(doc, indent=2, allow_nan=False))
    finally:
        leave_process_group()
