"""Images in folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from jacobiflow.data.config import DataError
from jacobiflow.data.decoding import SUFFIXES, Form, Pictures, Rows, decode_all

VALIDATION = ("val", "valid", "validation", "test")


class FolderPart:
    """All images below a folder, by path; its first-level sub-folders that hold images are the classes.

    Class numbers are places in `order`, or in the sorted names of the sub-folders.
    """

    def __init__(self, root: Path, order: tuple[str, ...] | None = None) -> None:
        self.root, self.name = root, str(root)
        self.paths = find_images(root)
        if not self.paths:
            raise DataError(f"{root} holds no images: give a folder with {', '.join(sorted(SUFFIXES))} files")
        self.folders = [p.parts[0] if len(p.parts) > 1 else None for p in self.paths]
        self.classes = order or tuple(sorted({f for f in self.folders if f is not None}))

    def __len__(self) -> int:
        return len(self.paths)

    def labels(self) -> npt.NDArray[Any]:
        number = {name: i for i, name in enumerate(self.classes)}
        if not number:
            raise DataError(
                f"{self.root} has no labels but the model has classes: "
                "put the images of each class into a sub-folder of its own"
            )
        for path, folder in zip(self.paths, self.folders, strict=True):
            if folder is None:
                raise DataError(f"{self.root / path} belongs to no class: move it into a class folder")
            if folder not in number:
                raise DataError(
                    f"{self.root / folder} is a class without training images: add some or remove it"
                )
        return np.array([number[f] for f in self.folders if f is not None], dtype=np.int64)

    def read(self, rows: Rows, form: Form) -> Pictures:
        items = ((str(self.paths[row]), self.root / self.paths[row]) for row in rows)
        return decode_all(items, rows, form, self.name)


def open_folder(root: Path) -> tuple[FolderPart, FolderPart | None]:
    """The training images of a folder, and the validation images if it tells them apart.

    It does by sub-folders train and val, valid, validation or test (the first of these that is there).
    A folder whose only sub-folder is train is read as that.
    """
    folders = {f.name.lower(): f for f in _entries(root) if f.is_dir() and not f.name.startswith(".")}
    held = next((folders[name] for name in VALIDATION if name in folders), None)
    if "train" not in folders or (held is None and len(folders) > 1):
        return FolderPart(root), None
    train = FolderPart(folders["train"])
    return train, None if held is None else FolderPart(held, train.classes)


def find_images(root: Path) -> list[Path]:
    """The image files at any depth below `root`, as sorted paths relative to it.

    What is hidden (.name) is not looked at. Links to folders are followed, each folder once.
    """
    found: list[Path] = []
    seen = {_identity(root)}
    for place, folders, files in os.walk(root, onerror=_unreadable, followlinks=True):
        here = Path(place)
        fresh = []
        for name in sorted(folders):
            if not name.startswith(".") and (key := _identity(here / name)) not in seen:
                seen.add(key)
                fresh.append(name)
        folders[:] = fresh
        below = here.relative_to(root)
        found += [
            below / f for f in files if not f.startswith(".") and os.path.splitext(f)[1].lower() in SUFFIXES
        ]
    return sorted(found, key=lambda p: p.parts)


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except OSError as error:
        _unreadable(error)


def _identity(folder: Path) -> tuple[int, int]:
    stat = folder.stat()
    return stat.st_dev, stat.st_ino


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}): check its permissions")
