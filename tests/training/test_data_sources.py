"""The command trains on every kind of source, and refuses what it cannot use in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

import jacobiflow as jf


def pictures() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    y = np.arange(40) % 2
    x = draw.integers(0, 60, (40, 8, 8)) + 150 * y[:, None, None]
    return x.astype(np.uint8), y


def class_folders(folder: Path, *, deep: bool = False) -> Path:
    """Grey, colour, transparent and 16-bit files, in a folder for each class."""
    for i, (x, y) in enumerate(zip(*pictures(), strict=True)):
        place = folder / ("dark", "light")[y] / (f"part{i % 3}" if deep else "")
        place.mkdir(parents=True, exist_ok=True)
        picture = Image.fromarray(x)
        if i % 4 == 1:
            picture = picture.convert("RGBA")
        elif i % 4 == 2:
            picture = picture.convert("RGB")
        elif i % 4 == 3:
            picture = Image.fromarray(x.astype(np.uint16) * 257)
        picture.save(place / f"{i}.png")
    return folder


def hub_folder(folder: Path) -> Path:
    x, y = pictures()
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dark", "light"])})
    rows = {"image": [Image.fromarray(p) for p in x], "label": y.tolist()}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(str(folder))
    return folder


def npz(path: Path, labels: np.ndarray | None = None) -> Path:
    x, y = pictures()
    np.savez(path, x=x, y=y if labels is None else labels)
    return path


SOURCES: dict[str, Any] = {
    "npz": lambda tmp: npz(tmp / "data.npz"),
    "folder": lambda tmp: class_folders(tmp / "data"),
    "nested": lambda tmp: class_folders(tmp / "data", deep=True),
    "dataset": lambda tmp: hub_folder(tmp / "data"),
}


@pytest.mark.filterwarnings("ignore")  # of the datasets library, about its own use of others
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source(kind: str, train: Any, tmp_path: Path) -> None:
    source = SOURCES[kind](tmp_path)
    flags = ("--data.source", source, "--data.validation", 0.2, "--training.epochs", 3)
    entries = train(tmp_path / "run", *flags)
    losses = [e["loss"] for e in entries if "loss" in e]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.1
    assert jf.load(tmp_path / "run" / "model").num_classes == 2


def test_the_same_pictures_train_the_same_from_any_source(train: Any, tmp_path: Path) -> None:
    """A file of arrays and a dataset folder hold the same rows in the same order."""
    flags = ("--data.validation", 0.2, "--training.epochs", 1)
    first = train(tmp_path / "a", "--data.source", npz(tmp_path / "data.npz"), *flags)
    second = train(tmp_path / "b", "--data.source", hub_folder(tmp_path / "data"), *flags)
    assert [e["loss"] for e in first if "loss" in e] == [e["loss"] for e in second if "loss" in e]


@pytest.mark.filterwarnings("always")  # the command prints its warnings
def test_corrupt_files_are_named_and_left_out(train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = class_folders(tmp_path / "data")
    (source / "dark" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnot a picture")
    train(tmp_path / "run", "--data.source", source, "--data.validation", 0.2, "--training.epochs", 1)
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert len(warnings) == 1
    assert "1 of 41 images" in warnings[0]
    assert "broken.png" in warnings[0]


def empty(tmp: Path) -> Path:
    (tmp / "empty").mkdir()
    return tmp / "empty"


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:300])
    return path


def all_corrupt(tmp: Path) -> Path:
    (tmp / "bad").mkdir()
    for i in range(3):
        (tmp / "bad" / f"{i}.png").write_bytes(b"no")
    return tmp / "bad"


REFUSED: dict[str, Any] = {
    "wrong path": (lambda tmp: tmp / "gone.npz", "gone.npz"),
    "empty folder": (empty, "empty"),
    "corrupt files only": (all_corrupt, "bad"),
    "labels out of range": (lambda tmp: npz(tmp / "data.npz", np.arange(40) % 5), "label"),
    "no labels": (lambda tmp: SOURCES["folder"](tmp) / "dark", "label"),
    "a cut npz": (lambda tmp: cut(npz(tmp / "data.npz")), "data.npz"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused(kind: str, refusal: Any, tmp_path: Path) -> None:
    make, word = REFUSED[kind]
    line = refusal("--data.source", make(tmp_path), "--out", tmp_path / "run")
    assert word in line
    assert not (tmp_path / "run" / "log.jsonl").exists()
