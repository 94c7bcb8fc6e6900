"""Images in folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from jacobiflow.data.config import VALIDATION, DataError
from jacobiflow.data.decoding import SUFFIXES, Encoded, Part, Rows


class FolderPart(Part):
    """All images below a folder, sorted by path. First-level sub-folders that hold images are the classes.

    A class number is the index in `classes`; default: the sorted names of the sub-folders.
    """

    def __init__(self, root: Path, classes: tuple[str, ...] | None = None) -> None:
        self.root, self.name = root, str(root)
        self.paths = find_images(root)
        if not self.paths:
            raise DataError(f"{root} holds no images: give a folder with {', '.join(sorted(SUFFIXES))} files")
        self.folders = [p.parts[0] if len(p.parts) > 1 else None for p in self.paths]
        self.classes = classes or tuple(sorted({f for f in self.folders if f is not None}))

    def __len__(self) -> int:
        return len(self.paths)

    def labels(self) -> npt.NDArray[Any]:
        number = {name: i for i, name in enumerate(self.classes)}
        if not number:
            advice = "put the images of each class into a sub-folder of its own"
            raise DataError(f"{self.root} has no labels but the model has classes: {advice}")
        for path, folder in zip(self.paths, self.folders, strict=True):
            if folder is None:
                raise DataError(f"{self.root / path} belongs to no class: move it into a class folder")
            if folder not in number:
                raise DataError(f"{self.root / folder} is a class without training images: add some or remove it")
        return np.array([number[f] for f in self.folders if f is not None], dtype=np.int64)

    def items(self, rows: Rows) -> Iterator[tuple[str, Encoded]]:
        return ((str(self.paths[row]), self.root / self.paths[row]) for row in rows)


def open_folder(root: Path) -> tuple[FolderPart, FolderPart | None]:
    """The training images of a folder, and its validation images if they have a folder of their own.

    These are the sub-folders train and validation, valid, val or test (the first that exists). If the only
    sub-folder is train, its images are split.
    """
    try:
        folders = {f.name.lower(): f for f in sorted(root.iterdir()) if f.is_dir() and f.name[0] != "."}
    except OSError as error:
        _unreadable(error)
    held = next((folders[name] for name in VALIDATION if name in folders), None)
    if "train" not in folders or (held is None and len(folders) > 1):
        return FolderPart(root), None
    train = FolderPart(folders["train"])
    return train, None if held is None else FolderPart(held, train.classes)


def find_images(root: Path) -> list[Path]:
    """The image files at any depth below `root`, as sorted paths relative to it.

    Hidden files and folders (.name) are skipped. Links to folders are followed, each folder once.
    """
    images, seen = list[Path](), set[tuple[int, int]]()

    def first_time(folder: Path) -> bool:
        stat, count = folder.stat(), len(seen)
        seen.add((stat.st_dev, stat.st_ino))
        return len(seen) > count

    first_time(root)
    for place, folders, files in os.walk(root, onerror=_unreadable, followlinks=True):
        here = Path(place)
        folders[:] = [name for name in sorted(folders) if not name.startswith(".") and first_time(here / name)]
        shown = (here.relative_to(root) / name for name in files if not name.startswith("."))
        images += [path for path in shown if path.suffix.lower() in SUFFIXES]
    return sorted(images, key=lambda path: path.parts)


def _unreadable(error: OSError) -> NoReturn:
    raise DataError(f"{error.filename} cannot be read ({error.strerror}): check its permissions") from None
