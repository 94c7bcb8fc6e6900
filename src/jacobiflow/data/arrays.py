"""Images in .npz files."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jacobiflow.data.config import DataError
from jacobiflow.data.decoding import CHUNK, Form, Pictures, Pixels, Rows, check_memory, decode_all

npy: Any = np.lib.format  # without types
REWRITE = "write the file again with numpy.savez_compressed"


class Npz:
    """An .npz file whose arrays are checked before they are read; nothing in it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                members = archive.infolist()
        except zipfile.BadZipFile:
            raise DataError(f"{path} is not an .npz file, or a damaged one: {REWRITE}") from None
        except Exception as error:  # the central directory is untrusted too
            raise DataError(f"{path} cannot be read ({_line(error)}): {REWRITE}") from None
        self.members = {m.filename.removesuffix(".npy"): m for m in members if m.filename.endswith(".npy")}

    def first(self, *names: str) -> str | None:
        """The first of these names that is an array here."""
        return next((n for n in names if n in self.members), None)

    def array(self, name: str, dtypes: type[Any], advice: str) -> npt.NDArray[Any]:
        """The array `name`, if its dtype is one of `dtypes`."""
        where, member = f"{self.path}: {name}", self.members[name]
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(member) as stream:
                version = npy.read_magic(stream)
                if version != (1, 0):  # later ones may claim a header of gigabytes
                    raise DataError(f"{where} is in npy format {version[0]}.{version[1]}: {REWRITE}")
                shape, _, dtype = npy.read_array_header_1_0(stream)
                if not np.issubdtype(dtype, dtypes):
                    raise DataError(f"{where} holds {dtype} values: {advice}")
                size = math.prod(shape) * dtype.itemsize
                if min(shape, default=0) < 0 or size != member.file_size - stream.tell():
                    raise DataError(f"{where} claims a shape of {shape} but its data differs: {REWRITE}")
                check_memory(size, where)
                stream.seek(0)
                return np.asarray(npy.read_array(stream, allow_pickle=False))
        except DataError:
            raise
        except Exception as error:  # damaged files make zipfile, zlib and numpy raise almost anything
            raise DataError(f"{where} cannot be read ({_line(error)}): {REWRITE}") from None


class ArrayPart:
    """Images of one array of an .npz file; labels of another."""

    classes: tuple[str, ...] = ()

    def __init__(self, file: Npz, images: str, labels: str | None, advice: str) -> None:
        self.file, self.label_name, self.advice = file, labels, advice
        self.name = f"{file.path}: {images}"
        advice = "for x in [0, 1] (x * 255).round().astype('uint8')"
        array = file.array(images, np.uint8, f"store uint8 pixels from 0 to 255, {advice}")
        self.images = _channels_last(array, self.name)

    def __len__(self) -> int:
        return len(self.images)

    def labels(self) -> npt.NDArray[Any]:
        if self.label_name is None:
            raise DataError(f"{self.name} has no labels but the model has classes: {self.advice}")
        labels = self.file.array(self.label_name, np.integer, "labels must be whole numbers, one an image")
        if labels.shape not in ((len(self),), (len(self), 1)):
            raise DataError(
                f"{self.file.path}: {self.label_name} has shape {labels.shape} for {len(self)} images: "
                "give one label an image"
            )
        return labels.reshape(-1)

    def read(self, rows: Rows, form: Form) -> Pictures:
        _, height, width, channels = self.images.shape
        wanted = (form.size or height, form.size or width, form.channels or channels)
        if channels == 4 or wanted != (height, width, channels) or form.like not in (None, (height, width)):
            flat = self.images[..., 0] if channels == 1 else self.images
            items = ((f"image {row}", flat[row]) for row in rows)
            return decode_all(items, rows, form, self.name)
        pixels: Pixels = np.empty((len(rows), channels, height, width), dtype=np.uint8)
        for start in range(0, len(rows), CHUNK):  # a whole transposed copy would be a second dataset
            some = slice(start, start + CHUNK)
            pixels[some] = self.images[rows[some]].transpose(0, 3, 1, 2)
        return Pictures(pixels, rows, [])


def open_npz(path: Path) -> tuple[ArrayPart, ArrayPart | None]:
    """The training images of an .npz file, and its validation images if it tells them apart.

    Arrays: x_train, y_train, x_test, y_test (only the first is a must); or x or images, with y or
    labels; or one array of any name. Images are uint8 [N, H, W], [N, H, W, C] or [N, C, H, W] with C
    one of 1, 3, 4 (of a shape that can be read both ways the last axis is the channels).
    """
    file = Npz(path)
    if "x_train" in file.members:
        train = ArrayPart(file, "x_train", file.first("y_train"), "add an array y_train")
        test = None
        if "x_test" in file.members:
            test = ArrayPart(file, "x_test", file.first("y_test"), "add an array y_test")
        return train, test
    images, labels = file.first("x", "images"), file.first("y", "labels")
    if images is None and len(file.members) == 1:
        images, labels = next(iter(file.members)), None
    if images is None:
        found = ", ".join(sorted(file.members)) or "no arrays"
        raise DataError(f"{path} holds {found}: name the images x_train or x, and their labels y_train or y")
    return ArrayPart(file, images, labels, "add an array y"), None


def _channels_last(x: npt.NDArray[Any], where: str) -> Pixels:
    """Images as [N, H, W, C]."""
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and x.shape[3] not in (1, 3, 4) and x.shape[1] in (1, 3, 4):
        x = x.transpose(0, 2, 3, 1)
    elif x.ndim != 4 or x.shape[3] not in (1, 3, 4):
        raise DataError(
            f"{where} has shape {x.shape}: give [N, H, W], [N, H, W, C] or [N, C, H, W], C 1, 3 or 4"
        )
    if 0 in x.shape[1:]:
        raise DataError(f"{where} has shape {x.shape}: its images have no pixels")
    return x


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
