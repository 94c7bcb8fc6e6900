"""`jacobiflow train`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jacobiflow.cli.options import listing, note, parse, pick_device
from jacobiflow.core.processes import World, leave
from jacobiflow.data.ising import Ising
from jacobiflow.data.sources import DataConfig, Images, load_images
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.maf import MAF, MAFConfig
from jacobiflow.flows.tarflow import TarFlow, TarFlowConfig
from jacobiflow.flows.weights import check_size
from jacobiflow.training.log import last
from jacobiflow.training.loop import STEPS, Draws, Trainer, TrainingError
from jacobiflow.training.recipe import Recipe, TrainingConfig, recipe_names


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train a flow. Every field of the recipe is a flag.

    A run writes into --out:
    - state.safetensors: the same command resumes from it after a crash, Ctrl-C or SIGTERM
    - log.jsonl, and grids of samples in samples/
    - model/: the trained flow, at the end; kept/: earlier ones, if asked for

    example: jacobiflow train mnist-cpu --data.source mnist.npz --training.epochs 2
    """

    model: TarFlowConfig | MAFConfig
    data: DataConfig
    target: Ising | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    out: Path = Path("runs/flow")
    """Folder of the run."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    json: bool = False
    """At the end, print JSON: what was logged last, and where the model is."""


def usage() -> str:
    """What `jacobiflow train --help` prints: the flags depend on the recipe."""
    names = listing((name, Recipe.load(name).about) for name in recipe_names())
    return (
        "usage: jacobiflow train RECIPE [options]\n\n"
        "RECIPE is a TOML file or one of\n"
        f"{names}\n\n"
        "`jacobiflow train RECIPE --help` lists its fields, all of which are options.\n\n"
        "example:\n"
        "  jacobiflow train mnist-cpu --data.source mnist.npz --out runs/mnist\n"
        "on 8 GPUs of one machine:\n"
        "  torchrun --nproc-per-node 8 -m jacobiflow.cli.main train cifar10"
    )


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return
    recipe = Recipe.load(argv[0])
    default = Args(
        model=recipe.model,
        data=recipe.data,
        target=recipe.target,
        training=recipe.training,
        out=Path("runs") / Path(argv[0]).stem,
    )
    args = parse(Args, argv[1:], command=f"train {argv[0]}", default=default)
    recipe = Recipe(
        model=args.model, data=args.data, target=args.target, training=args.training, about=recipe.about
    )
    world = World.from_environment()
    try:
        train(recipe, args.out, pick_device(args.device), world)
        if args.json and world.leader:
            doc = {"out": str(args.out), "model": str(args.out / "model"), **last(args.out)}
            print(json.dumps(doc, indent=2, allow_nan=False))
    finally:
        leave()


def train(recipe: Recipe, out: Path, device: torch.device, world: World) -> None:
    """Build flow and data by the recipe and run it."""
    check_size(recipe.model.shapes())  # before data is read for it
    images = load_for(recipe)
    device = world.device(device)
    torch.manual_seed(recipe.training.seed)
    flow = build_flow(recipe.model, recipe.target).to(device)
    trainer = Trainer(recipe, flow, images[0], images[1], out, world)
    if world.leader:
        count = sum(p.numel() for p in flow.parameters())
        data = f"{len(images[0]):,} + {len(images[1]):,} images (training + validation)"
        note(
            f"{count:,} parameters, {data if recipe.target is None else 'reverse KL'}, "
            f"{trainer.total:,} steps on {world.size} x {device.type}, into {out}"
        )
    trainer.run()
    if world.leader:
        note(f"done; try: jacobiflow sample {out / 'model'} -n 16 --out samples")


def build_flow(config: Any, target: Ising | None = None) -> Flow:
    """A fresh flow of this shape; its linear map, if it has one, is that of the target's normal part."""
    if not isinstance(config, MAFConfig):
        return TarFlow(config)
    flow = MAF(config)
    if target is not None:
        flow.target = target.to_dict()
        if flow.linear is not None:
            flow.linear.copy_(target.root())
    return flow


def load_for(recipe: Recipe) -> tuple[Images, Images] | tuple[Draws, Draws]:
    """The recipe's images in the shape that its model takes; with a target, draws of noise."""
    if recipe.target is not None:
        return Draws(STEPS * recipe.training.batch_size), Draws(recipe.training.validate)
    if not recipe.data.source:
        raise TrainingError(
            "the recipe names no data: give --data.source an .npz file, a folder or a dataset id"
        )
    model = recipe.model
    if isinstance(model, TarFlowConfig):
        return load_images(
            recipe.data,
            image_size=model.image_size,
            channels=model.image_channels,
            num_classes=model.num_classes,
        )
    if model.context:
        raise TrainingError(f"images bring no context: set model.context to 0, not {model.context}")
    side = math.isqrt(model.features)
    if side**2 != model.features:
        raise TrainingError(
            f"model.features {model.features} is no square: grey images of that many pixels do not exist"
        )
    return load_images(recipe.data, image_size=side, channels=1)
