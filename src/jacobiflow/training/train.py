"""Training by a recipe: build the flow, read the data, run the loop."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jacobiflow.core.noise import Noise
from jacobiflow.core.processes import World
from jacobiflow.data.sources import Images, load_images
from jacobiflow.flows.calibration import calibrate
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.families import family_of
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.profile import measure_profile
from jacobiflow.flows.tarflow import TarFlowConfig
from jacobiflow.flows.weights import check_size
from jacobiflow.training.loop import STEPS, Draws, Trainer, TrainingError
from jacobiflow.training.recipe import Recipe

PROFILE_SECONDS = 60.0


def train(recipe: Recipe, out: Path, device: torch.device, world: World) -> None:
    """Train the flow of a recipe into the folder `out`."""
    check_size(recipe.model.shapes())  # before data is read for it
    images = load_for(recipe)
    device = world.device(device)
    torch.manual_seed(recipe.training.seed)
    flow = build_flow(recipe.model, recipe.training.noise).to(device)
    trainer = Trainer(recipe, flow, images[0], images[1], out, world)
    if world.leader:
        count = sum(p.numel() for p in flow.parameters())
        data = f"{len(images[0]):,} + {len(images[1]):,} images (training + validation)"
        _note(
            f"{count:,} parameters, {'no data' if flow.trains_on_noise else data}, "
            f"{trainer.total:,} steps on {world.size} x {device.type}, into {out}"
        )
    trainer.run()
    if world.leader:
        _note("measuring how fast sweeps converge, for plan auto")
        measure(out / "model")
        _note(f"done; try: jacobiflow sample {out / 'model'} -n 16 --out samples")


def measure(folder: Path) -> None:
    """Fit first guesses and measure the convergence profile of a checkpoint, within about a minute."""
    flow = load(folder)
    calibrate(flow, seconds=PROFILE_SECONDS / 8)
    measure_profile(flow, seconds=PROFILE_SECONDS)
    for measured in (flow.calibration, flow.profile):
        if measured is not None:
            measured.save(folder)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_flow(config: Any, noise: Noise | None = None) -> Flow:
    """A fresh flow of this shape, whose config records the noise that its data are given."""
    family = family_of(config)
    flow: Flow = family(config if family.trains_on_noise else replace(config, noise=noise))
    return flow


def load_for(recipe: Recipe) -> tuple[Images, Images] | tuple[Draws, Draws]:
    """The recipe's images in the shape that its model takes; draws of noise for a family without data."""
    if family_of(recipe.model).trains_on_noise:
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
