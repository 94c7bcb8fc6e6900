"""Images in folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jacobiflow.data.config import VALIDATION, DataError, data_errors
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
        self.folders = [p.parts[0] if len(p.parts) > 1 else "" for p in self.paths]
        self.classes = classes or tuple(sorted({*self.folders} - {""}))

    def __len__(self) -> int:
        return len(self.paths)

    def labels(self) -> npt.NDArray[Any]:
        if not self.classes:
            advice = "put the images of each class into a sub-folder of its own"
            raise DataError(f"{self.root} has no labels but the model has classes: {advice}")
        number = {name: i for i, name in enumerate(self.classes)}
        for path, folder in zip(self.paths, self.folders, strict=True):
            if not folder:
                raise DataError(f"{self.root / path} belongs to no class: move it into a class folder")
            if folder not in number:
                raise DataError(f"{self.root / folder} is a class without training images: add some or remove it")
        return np.array([number[folder] for folder in self.folders], dtype=np.int64)

    def items(self, rows: Rows) -> Iterator[tuple[str, Encoded]]:
        return ((str(self.paths[row]), self.root / self.paths[row]) for row in rows)


def open_folder(root: Path) -> tuple[FolderPart, FolderPart | None]:
    """The training images of a folder, and its validation images if they have a folder of their own.

    These are the sub-folders train and validation, valid, val or test (the first that exists).
    """
    with data_errors(f"{root} cannot be read", "check its permissions"):
        folders = {f.name.lower(): f for f in sorted(root.iterdir()) if f.is_dir() and f.name[0] != "."}
        held = next((folders[name] for name in VALIDATION if name in folders), None)
        if "train" not in folders or (held is None and len(folders) > 1):
            return FolderPart(root), None
        train = FolderPart(folders["train"])
        return train, None if held is None else FolderPart(held, train.classes)


def find_images(root: Path) -> list[Path]:
    """The image files at any depth below `root`, as sorted paths relative to it.

    Hidden files and folders (.name) are skipped. Links to folders are followed, each folder once.
    """
    images, seen, todo = list[Path](), set[tuple[int, int]](), [root]
    for folder in todo:
        stat = folder.stat()
        if (stat.st_dev, stat.st_ino) in seen:
            continue
        seen.add((stat.st_dev, stat.st_ino))
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            path = Path(entry.path)
            if entry.is_dir() and path.name[0] != ".":
                todo.append(path)
            elif path.suffix.lower() in SUFFIXES and path.name[0] != ".":
                images.append(path.relative_to(root))
    return sorted(images, key=lambda path: path.parts)
