"""Training by a recipe: build the flow, read the data, run the loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from jacobiflow.core.processes import World
from jacobiflow.core.progress import note
from jacobiflow.core.rows import Noise
from jacobiflow.data.decoding import Images
from jacobiflow.data.sources import Survey, load_images, survey
from jacobiflow.flows.calibration import calibrate
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.families import family_of
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.profile import measure_profile
from jacobiflow.flows.weights import check_size
from jacobiflow.training.loop import STEPS, Draws, Trainer
from jacobiflow.training.recipe import Recipe, conversion, image_form, said_of_images
from jacobiflow.training.state import FILE, TrainingError

PROFILE_SECONDS = 60.0


def train(recipe: Recipe, out: Path, device: torch.device, world: World, data: Survey | None = None) -> None:
    """Train the flow of a recipe into the folder `out`. data: the images that the recipe was inferred from."""
    check_size(recipe.model.shapes())  # before data is read for it
    if world.leader and data is not None:
        note("\n".join(said_of_images(recipe, data)))
    images = load_for(recipe)
    if world.leader and data is None and recipe.data.source:
        found = survey(recipe.data)
        if changed := conversion(recipe, found):
            note(f"{recipe.data.source}: {found}: {changed}")
    device = world.device(device)
    torch.manual_seed(recipe.training.seed)
    names = images[0].classes if isinstance(images[0], Images) else ()
    flow = build_flow(recipe.model, recipe.training.noise, names).to(device)
    if recipe.training.start and not (out / FILE).exists():  # the state of a resumed run has its weights
        take_weights(flow, recipe.training.start)
    trainer = Trainer(recipe, flow, images[0], images[1], out, world)
    if world.leader:
        count = sum(p.numel() for p in flow.parameters())
        held = f"{len(images[0]):,} images and {len(images[1]):,} for validation"
        where = f"{world.size} x {device.type}" if world.size > 1 else device.type
        note(f"{count:,} parameters, {'no data' if flow.trains_on_noise else held}")
        note(f"{trainer.total:,} steps on {where}, into {out}")
    trainer.run()
    if world.leader:
        flow = load(out / "model")
        if flow.profile is None:  # a finished run that is run again has one
            note("measuring how fast sweeps converge, for plan auto")
            measure(flow, PROFILE_SECONDS)
            flow.save(out / "model")
        note(f"done; try: jacobiflow sample {out / 'model'} -n 16 --out samples")


def measure(flow: Flow, seconds: float, progress: Callable[[str], None] = lambda _: None) -> str:
    """Fit first guesses and measure the convergence profile, for plan auto; returns what was left out."""
    calibrate(flow, seconds=seconds / 8, progress=progress)
    entry = measure_profile(flow, seconds=seconds, progress=progress)
    guess = "" if flow.calibration else "the calibrated first guess"
    return " and ".join(filter(None, (guess, entry.left_out if entry else "the convergence profile")))


def build_flow(config: Any, noise: Noise | None = None, names: tuple[str, ...] = ()) -> Flow:
    """A fresh flow of this shape, whose config records the noise of its data and the names of their classes."""
    family = family_of(config)
    if not family.trains_on_noise:
        config = replace(config, noise=noise)
    if names and len(names) == getattr(config, "num_classes", 0) and not config.class_names:
        config = replace(config, class_names=names)
    return cast(Flow, family(config))


def take_weights(flow: Flow, source: str) -> None:
    """Copy the weights of another flow, which has tensors of the same names and shapes, into `flow`."""
    like = next(flow.parameters())
    found = load(source, dtype=like.dtype, device=like.device).state_dict()
    have, need = ({k: list(v.shape) for k, v in t.items()} for t in (found, flow.state_dict()))
    for name in sorted(have.keys() | need.keys()):
        if have.get(name) != need.get(name):
            shapes = f"tensor {name} is {have.get(name, 'missing')} there, {need.get(name, 'missing')} here"
            raise TrainingError(f"training.start {source} has another shape than the model: {shapes}")
    flow.load_state_dict(found)


def load_for(recipe: Recipe) -> tuple[Images, Images] | tuple[Draws, Draws]:
    """The recipe's images in the shape that its model takes; draws of noise for a family without data."""
    if family_of(recipe.model).trains_on_noise:
        return Draws(STEPS * recipe.training.batch_size), Draws(recipe.training.validate)
    if not recipe.data.source:
        raise TrainingError("the recipe names no data: give --data.source an .npz file, a folder or a dataset id")
    side, channels, classes = image_form(recipe.model)
    return load_images(recipe.data, image_size=side, channels=channels, num_classes=classes)
