"""Training by a recipe: build the flow, read the data, run the loop."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
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
from jacobiflow.training.state import FILE

PROFILE_SECONDS = 60.0


def train(recipe: Recipe, out: Path, device: torch.device, world: World) -> None:
    """Train the flow of a recipe into the folder `out`."""
    check_size(recipe.model.shapes())  # before data is read for it
    images = load_for(recipe)
    device = world.device(device)
    torch.manual_seed(recipe.training.seed)
    flow = build_flow(recipe.model, recipe.training.noise).to(device)
    if recipe.training.start and not (out / FILE).exists():  # the state of a resumed run has its weights
        take_weights(flow, recipe.training.start)
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
        flow = load(out / "model")
        measure(flow, PROFILE_SECONDS)
        flow.save(out / "model")
        _note(f"done; try: jacobiflow sample {out / 'model'} -n 16 --out samples")


def measure(flow: Flow, seconds: float, progress: Callable[[str], None] = lambda _: None) -> str:
    """Fit first guesses and measure the convergence profile, for plan auto; returns what was left out."""
    calibrate(flow, seconds=seconds / 8, progress=progress)
    entry = measure_profile(flow, seconds=seconds, progress=progress)
    left_out = ["the calibrated first guess"] * (flow.calibration is None)
    left_out += ["the convergence profile"] if entry is None else [entry.left_out] * bool(entry.left_out)
    return " and ".join(left_out)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def build_flow(config: Any, noise: Noise | None = None) -> Flow:
    """A fresh flow of this shape, whose config records the noise that its data are given."""
    family = family_of(config)
    flow: Flow = family(config if family.trains_on_noise else replace(config, noise=noise))
    return flow


def take_weights(flow: Flow, source: str) -> None:
    """Copy the weights of another flow, which has tensors of the same names and shapes, into `flow`."""
    like = next(flow.parameters())
    found = load(source, dtype=like.dtype, device=like.device).state_dict()
    have, need = ({k: list(v.shape) for k, v in t.items()} for t in (found, flow.state_dict()))
    for name in sorted(have.keys() | need.keys()):
        if have.get(name) != need.get(name):
            shapes = f"{have.get(name, 'missing')} there, {need.get(name, 'missing')} here"
            wrong = f"training.start {source} has another shape than the model"
            raise TrainingError(f"{wrong}: tensor {name} is {shapes}")
    flow.load_state_dict(found)


def load_for(recipe: Recipe) -> tuple[Images, Images] | tuple[Draws, Draws]:
    """The recipe's images in the shape that its model takes; draws of noise for a family without data."""
    if family_of(recipe.model).trains_on_noise:
        return Draws(STEPS * recipe.training.batch_size), Draws(recipe.training.validate)
    if not recipe.data.source:
        raise TrainingError("the recipe names no data: give --data.source an .npz file, a folder or a dataset id")
    model, channels, classes = recipe.model, 1, 0
    if isinstance(model, TarFlowConfig):
        side, channels, classes = model.image_size, model.image_channels, model.num_classes
    elif model.context:
        raise TrainingError(f"images bring no context: set model.context to 0, not {model.context}")
    else:
        side = math.isqrt(model.features)
        if side**2 != model.features:
            wrong = f"model.features {model.features} is no square"
            raise TrainingError(f"{wrong}: grey images of that many pixels do not exist")
    return load_images(recipe.data, image_size=side, channels=channels, num_classes=classes)
