"""`jacobiflow train --images`: what is inferred from images, and what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import jacobiflow as jf
from jacobiflow.cli.main import main
from jacobiflow.data.sources import DataConfig, DataError, survey
from jacobiflow.training.recipe import recipe_for

CPU = torch.device("cpu")


def save(path: Path, width: int, height: int, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(width * 1000 + height)
    pixels = draw.integers(0, 256, (height, width, 3)).astype(np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Grey 8 x 8 images of two classes."""
    for i in range(12):
        save(tmp_path / f"photos/{'cat' if i % 2 else 'dog'}/{i}.png", 8, 8, "L")
    return tmp_path / "photos"


def test_what_a_folder_holds(photos: Path) -> None:
    found = survey(DataConfig(source=str(photos)))
    assert (found.count, found.sizes, found.channels, found.classes) == (12, ((8, 8),), 1, 2)
    assert str(found) == "8 x 8 grey"
    save(photos / "cat/wide.png", 30, 20)
    (photos / "cat/broken.png").write_bytes(b"no image")
    found = survey(DataConfig(source=str(photos)))
    assert str(found) == "2 sizes from 8 x 8 to 30 x 20 colour"


def test_what_an_array_holds(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((9, 6, 5, 3), np.uint8), y=np.arange(9) % 3)
    found = survey(DataConfig(source=str(tmp_path / "a.npz")))
    assert (found.count, found.sizes, found.channels, found.classes) == (9, ((5, 6),), 3, 3)


def test_nothing_to_look_at(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(DataError, match="none of 1 images can be read"):
        survey(DataConfig(source=str(tmp_path)))
    save(tmp_path / "b.png", 8, 8)
    with pytest.raises(DataError, match="holds 2 images: training needs 4 or more"):
        recipe_for(str(tmp_path), CPU)


def test_the_recipe_follows_the_images(photos: Path, tmp_path: Path) -> None:
    recipe, said = recipe_for(str(photos), CPU)
    shape = recipe.model.image_size, recipe.model.image_channels, recipe.model.num_classes
    assert shape == (8, 1, 2)
    assert recipe.training.batch_size == 6
    assert said == "12 images, 8 x 8 grey, 2 classes: patches of 1, 64 positions"
    for i in range(8):
        save(tmp_path / f"mixed/{i}.jpg", 40 + i, 50)
    recipe, said = recipe_for(str(tmp_path / "mixed"), CPU)
    assert (recipe.model.image_size, recipe.model.patch_size, recipe.model.num_classes) == (39, 3, 0)
    assert said.startswith("8 images, 8 sizes from 40 x 50 to 47 x 50 colour, no classes")
    assert said.endswith("images are cropped to squares and resized to 39 x 39 (see --data.fit)")


def test_train_and_load_the_run(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    small = "--model.width 16 --model.head-dim 16 --model.blocks 2 --model.patch-size 4 --training.epochs 2"
    flags: list[Any] = ["train", "--images", str(photos), "--out", str(out), *small.split()]
    for begun in ("12 images, 8 x 8 grey, 2 classes", "resuming from step 2"):
        assert main(flags) == 0
        assert begun in capsys.readouterr().err
    flow = jf.load(out)  # the folder of the run
    assert flow.config.noise == "gaussian"
    assert flow.sample(2, labels=1, plan="sequential", seed=0).x.shape == (2, 1, 8, 8)


def test_a_folder_must_follow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--images"]) == 2
    assert "--images takes a folder of images" in capsys.readouterr().err
