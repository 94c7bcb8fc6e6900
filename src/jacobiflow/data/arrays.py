"""Images in .npz files."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jacobiflow.data.config import DataError, data_errors
from jacobiflow.data.decoding import Encoded, Form, Images, Part, Pixels, Rows, check_memory

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

    def labels(self) -> npt.NDArray[Any]:
        if self.label_name is None:
            raise DataError(f"{self.name} has no labels but the model has classes: {self.advice}")
        labels = read_array(self.path, self.label_name, np.integer, "store one class number per image")
        if labels.shape not in ((len(self),), (len(self), 1)):
            wrong = f"has shape {labels.shape} for {len(self)} images: give one label per image"
            raise DataError(f"{self.path}: {self.label_name} {wrong}")
        return labels.reshape(-1)

    def items(self, rows: Rows) -> Iterator[tuple[str, Encoded]]:
        grey = self.images.shape[3] == 1
        for row in rows:
            yield f"image {row}", self.images[row, ..., 0] if grey else self.images[row]

    def read(self, rows: Rows, form: Form, labels: Tensor | None) -> tuple[Images, list[str]]:
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


def read_array(path: Path, name: str, dtypes: type[Any], advice: str) -> npt.NDArray[Any]:
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


def _channels_last(x: npt.NDArray[Any], where: str) -> Pixels:
    """Images as [N, H, W, C]."""
    found = x[..., None] if x.ndim == 3 else x
    if found.ndim == 4 and found.shape[3] not in (1, 3, 4):
        found = found.transpose(0, 2, 3, 1)
    if found.ndim != 4 or found.shape[3] not in (1, 3, 4):
        raise DataError(f"{where} has shape {x.shape}: give [N, H, W], [N, H, W, C] or [N, C, H, W], C 1, 3 or 4")
    if 0 in x.shape[1:]:
        raise DataError(f"{where} has shape {x.shape}: its images have no pixels")
    return found
