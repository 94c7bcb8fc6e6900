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
from jacobiflow.data.decoding import DataError
from jacobiflow.data.sources import DataConfig, survey
from jacobiflow.training.recipe import recipe_for, said_of_images

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
    recipe, data = recipe_for(str(photos), CPU)
    shape = recipe.model.image_size, recipe.model.image_channels, recipe.model.num_classes
    assert shape == (8, 1, 2)
    assert recipe.training.batch_size == 6
    assert recipe.training.epochs == 300  # 4,000 steps would be 2,000
    assert said_of_images(recipe, data) == [
        "12 images, 8 x 8 grey, 2 classes (cat, dog)",
        "model: patches of 1 x 1, 64 positions, 6 blocks of width 128",
    ]
    for i in range(8):
        save(tmp_path / f"mixed/{i}.jpg", 40 + i, 50)
    recipe, data = recipe_for(str(tmp_path / "mixed"), CPU)
    assert (recipe.model.image_size, recipe.model.patch_size, recipe.model.num_classes) == (42, 6, 0)
    assert said_of_images(recipe, data)[:2] == [
        "8 images, 8 sizes from 40 x 50 to 47 x 50 colour, no classes",
        "images are cropped to squares and resized to 42 x 42 (see --data.fit)",
    ]
    assert recipe_for(str(tmp_path / "mixed"), torch.device("cuda"))[0].model.length == 196  # the machine counts


def test_one_thin_image_does_not_decide_the_size(tmp_path: Path) -> None:
    for i in range(9):
        save(tmp_path / f"{i}.png", 32, 40)
    save(tmp_path / "thin.png", 3, 200)
    recipe, data = recipe_for(str(tmp_path), CPU)
    assert (data.side, recipe.model.image_size) == (32, 32)


def test_what_is_said_follows_the_flags(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--model.image-size 4 --model.patch-size 2 --model.num-classes 0 --training.label-drop 0 --data.fit pad"
    size = "--model.width 16 --model.head-dim 16 --model.blocks 2 --training.epochs 1"
    out = str(tmp_path / "run")
    assert main(["train", "--images", str(photos), "--out", out, *flags.split(), *size.split()]) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[:3] == [
        "12 images, 8 x 8 grey, classes not used",
        "images are resized to 4 x 4 (see --data.fit)",
        "model: patches of 2 x 2, 4 positions, 2 blocks of width 16",
    ]
    assert said[4] == f"1 steps on cpu, into {out}"
    assert max(map(len, said[:4])) <= 80


def test_a_recipe_says_how_it_changes_images(
    recipe: Path, train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "photos"
    for i in range(20):
        save(source / f"{'cat' if i % 2 else 'dog'}/{i}.png", 12, 10)
    train(tmp_path / "run", "--data.source", source, "--training.epochs", 1)
    first = capsys.readouterr().err.splitlines()[0]
    changed = "images are cropped to squares and resized to 8 x 8 (see --data.fit) and turned grey"
    assert first == f"{source}: 12 x 10 colour: {changed}"
    train(tmp_path / "other", "--training.epochs", 1)
    assert "images are" not in capsys.readouterr().err
    assert jf.load(tmp_path / "run").class_names == ("cat", "dog")
    assert jf.load(tmp_path / "other").class_names == ()  # arrays have no names


def test_train_and_load_the_run(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    small = "--model.width 16 --model.head-dim 16 --model.blocks 2 --model.patch-size 4 --training.epochs 2"
    flags: list[Any] = ["train", "--images", str(photos), "--out", str(out), *small.split()]
    for begun in ("12 images, 8 x 8 grey, 2 classes", "finished at step 2"):
        assert main(flags) == 0
        assert begun in capsys.readouterr().err
    flow = jf.load(out)  # the folder of the run
    assert flow.config.noise == "gaussian"
    assert flow.class_names == ("cat", "dog")
    assert flow.sample(2, labels=1, plan="sequential", seed=0).x.shape == (2, 1, 8, 8)
    sample = ["sample", str(out), "-n", "4", "--plan", "sequential", "--out", str(tmp_path / "out")]
    assert main([*sample, "--labels", "dog,0"]) == 0
    assert np.load(tmp_path / "out" / "samples.npz")["labels"].tolist() == [1, 0, 1, 0]
    capsys.readouterr()
    assert main([*sample, "--labels", "dgo", "--force"]) == 2
    known = "names (cat, dog)"
    assert f"--labels takes {known}, numbers and ranges such as 0-9 or 1,3,5-7, not 'dgo'" in capsys.readouterr().err


def test_a_folder_must_follow(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--images"]) == 2
    assert "--images takes a folder of images" in capsys.readouterr().err


def test_a_folder_where_a_recipe_belongs(photos: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(photos)]) == 2
    assert f"{photos} is not a recipe: to train on its images, use --images {photos}" in capsys.readouterr().err
    assert main(["train", "mnist-cpu", "--training.steps=30"]) == 2
    assert "no option takes steps: --training.epochs takes" in capsys.readouterr().err
