"""A recipe for one's own images: their shape decides the model, their number and the machine the training."""

from __future__ import annotations

import torch

from jacobiflow.data.sources import DataConfig, DataError, survey
from jacobiflow.flows.tarflow import TarFlowConfig
from jacobiflow.training.recipe import Recipe, TrainingConfig

MAX_SIDE = 64  # larger images take more than small models and a CPU can give
MAX_PATCHES = 16  # per side
STEPS = {"cpu": 4000, "cuda": 50_000}


def recipe_for(source: str, device: torch.device) -> tuple[Recipe, str]:
    """A recipe for the images of `source`, and what was inferred, in words."""
    config = DataConfig(source=source)
    data = survey(config)
    if data.count < 4:
        raise DataError(f"{source} holds {data.count} images: training needs 4 or more")
    shortest = min(min(size) for size in data.sizes)
    side, patch = image_side(shortest)
    cuda = device.type == "cuda"
    batch = min(64, data.count // 2)
    model = TarFlowConfig(
        image_size=side,
        image_channels=data.channels,
        patch_size=patch,
        width=256 if cuda else 128,
        blocks=6,
        layers_per_block=4 if cuda else 2,
        num_classes=data.classes,
        noise_std=0.1 if side <= 32 else 0.07,
    )
    training = TrainingConfig(
        epochs=max(1, round(STEPS["cuda" if cuda else "cpu"] * batch / data.count)),
        batch_size=batch,
        lr=1e-3 if not cuda else 3e-4,
        clip=1.0,
        ema=0.999,
        label_drop=0.1 if data.classes else 0.0,
    )
    labels = f"{data.classes} classes" if data.classes else "no classes"
    said = f"{data.count:,} images, {data}, {labels}: patches of {patch}, {model.length} positions"
    if data.sizes != ((side, side),):
        said += f"; images are cropped to squares and resized to {side} x {side} (see --data.fit)"
    return Recipe(model=model, data=config, training=training), said


def image_side(shortest: int) -> tuple[int, int]:
    """The side that images get, and the patch that divides it into at most MAX_PATCHES per side.

    >>> [image_side(side) for side in (28, 32, 64, 37, 500)]
    [(28, 2), (32, 2), (64, 4), (36, 3), (64, 4)]
    """
    side = min(shortest, MAX_SIDE)
    if side < 2:
        raise DataError(f"the shortest side of an image is {shortest} pixels: give larger images")
    patch = -(-side // MAX_PATCHES)
    return side - side % patch, patch
