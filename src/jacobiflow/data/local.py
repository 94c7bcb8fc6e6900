"""Images of this machine: .npz files and folders."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jacobiflow.data.decoding import SUFFIXES, VALIDATION, DataError, Form, Images, Part, check_memory, data_errors

Array = npt.NDArray[Any]
npy: Any = np.lib.format  # without types
REWRITE = "write the file again with numpy.savez_compressed"
PIXELS = "store uint8 pixels from 0 to 255, for x in [0, 1] (x * 255).round().astype('uint8')"


class ArrayPart(Part):
    """Images in one array of an .npz file, labels in another."""

    def __init__(self, path: Path, images: str, labels: str | None, advice: str) -> None:
        self.path, self.label_name, self.advice = path, labels, advice
        self.name = f"{path}: {images}"
        self.images = _channels_last(read_array(path, images, np.uint8, PIXELS), self.name)

    def __len__(self) -> int:
        return len(self.images)

    def labels(self) -> Array:
        if self.label_name is None:
            raise DataError(f"{self.name} has no labels but the model has classes: {self.advice}")
        labels = read_array(self.path, self.label_name, np.integer, "store one class number per image")
        if labels.shape not in ((len(self),), (len(self), 1)):
            wrong = f"has shape {labels.shape} for {len(self)} images: give one label per image"
            raise DataError(f"{self.path}: {self.label_name} {wrong}")
        return labels.reshape(-1)

    def item(self, row: int) -> tuple[str, Array]:
        image = self.images[row]
        return f"image {row}", image[..., 0] if image.shape[2] == 1 else image

    def read(self, rows: Array, form: Form, labels: Tensor | None) -> tuple[Images, list[str]]:
        _, height, width, channels = self.images.shape
        wanted = (form.size or height, form.size or width, form.channels or channels)
        if channels == 4 or wanted != (height, width, channels) or form.like not in (None, (height, width)):
            return super().read(rows, form, labels)
        pixels = torch.from_numpy(self.images).permute(0, 3, 1, 2).index_select(0, torch.from_numpy(rows))
        return Images(pixels, None if labels is None else labels[rows]), []


def open_npz(path: Path) -> tuple[ArrayPart, ArrayPart | None]:
    """The training images of an .npz file, and its validation images if they have an array of their own.

    Arrays: x_train, y_train, x_test, y_test (only the first is required); or x or images, with y or labels; or
    one array of any name. Images are uint8 [N, H, W], [N, H, W, C] or, unless that fits too, [N, C, H, W].
    """
    with data_errors(f"{path} cannot be read", REWRITE), zipfile.ZipFile(path) as archive:
        names = [n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")]

    def part(images: str, *labels: str) -> ArrayPart:
        return ArrayPart(path, images, next((n for n in labels if n in names), None), f"add an array {labels[0]}")

    if "x_train" in names:
        return part("x_train", "y_train"), part("x_test", "y_test") if "x_test" in names else None
    images = names if len(names) == 1 else [n for n in ("x", "images") if n in names]
    if not images:
        arrays = ", ".join(sorted(names)) or "no arrays"
        raise DataError(f"{path} holds {arrays}: name the images x_train or x, and their labels y_train or y")
    return part(images[0], "y", "labels"), None


def read_array(path: Path, name: str, dtypes: type[Any], advice: str) -> Array:
    """The array `name` of an .npz file, checked before memory is taken. Nothing is unpickled."""
    where = f"{path}: {name}"
    with data_errors(f"{where} cannot be read", REWRITE), zipfile.ZipFile(path) as archive:
        member = archive.getinfo(f"{name}.npy")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # zipfile inflates other kinds as a whole, whatever their size
            raise DataError(f"{where} is compressed in a way that numpy does not use: {REWRITE}")
        with archive.open(member) as stream:
            version = npy.read_magic(stream)
            if version != (1, 0):  # later ones may claim a header of gigabytes
                raise DataError(f"{where} is in npy format {version[0]}.{version[1]}: {REWRITE}")
            shape, _, dtype = npy.read_array_header_1_0(stream)
            data_bytes = member.file_size - stream.tell()
        if not np.issubdtype(dtype, dtypes):
            raise DataError(f"{where} holds {dtype} values: {advice}")
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != data_bytes:
            raise DataError(f"{where} claims a shape of {shape} but its data differs: {REWRITE}")
        check_memory(data_bytes, where)
        with np.load(path, allow_pickle=False) as file:
            return np.asarray(file[name])


def _channels_last(x: Array, where: str) -> Array:
    """Images as [N, H, W, C]."""
    found = x[..., None] if x.ndim == 3 else x
    if found.ndim == 4 and found.shape[3] not in (1, 3, 4):
        found = found.transpose(0, 2, 3, 1)
    if found.ndim != 4 or found.shape[3] not in (1, 3, 4) or 0 in found.shape[1:]:
        raise DataError(f"{where} has shape {x.shape}: give [N, H, W], [N, H, W, C] or [N, C, H, W], C 1, 3 or 4")
    return found


class FolderPart(Part):
    """All images below a folder, sorted by path. Sub-folders that hold images are the classes, in order of names."""

    def __init__(self, root: Path, classes: tuple[str, ...] | None = None) -> None:
        self.root, self.name = root, str(root)
        self.paths = find_images(root)
        if not self.paths:
            raise DataError(f"{root} holds no images: give a folder with {', '.join(sorted(SUFFIXES))} files")
        self.folders = [p.parts[0] if len(p.parts) > 1 else "" for p in self.paths]
        self.classes = classes or tuple(sorted({*self.folders} - {""}))

    def __len__(self) -> int:
        return len(self.paths)

    def labels(self) -> Array:
        if not self.classes:
            wrong = f"{self.root} has no labels but the model has classes"
            raise DataError(f"{wrong}: put the images of each class into a sub-folder of its own")
        number = {name: i for i, name in enumerate(self.classes)}
        for path, folder in zip(self.paths, self.folders, strict=True):
            if not folder:
                raise DataError(f"{self.root / path} belongs to no class: move it into a class folder")
            if folder not in number:
                raise DataError(f"{self.root / folder} is a class without training images: add some or remove it")
        return np.array([number[folder] for folder in self.folders], dtype=np.int64)

    def item(self, row: int) -> tuple[str, Path]:
        return str(self.paths[row]), self.root / self.paths[row]


def open_folder(root: Path) -> tuple[FolderPart, FolderPart | None]:
    """The images of a folder, or of its sub-folders train and validation, valid, val or test (the first there)."""
    with data_errors(f"{root} cannot be read", "check its permissions"):
        folders = {f.name.lower(): f for f in sorted(root.iterdir()) if f.is_dir() and f.name[0] != "."}
        held = next((folders[name] for name in VALIDATION if name in folders), None)
        if "train" not in folders or (held is None and len(folders) > 1):
            return FolderPart(root), None
        train = FolderPart(folders["train"])
        return train, None if held is None else FolderPart(held, train.classes)


def find_images(root: Path) -> list[Path]:
    """The image files below `root`, as sorted paths relative to it. Links are followed once; .names are skipped."""
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
