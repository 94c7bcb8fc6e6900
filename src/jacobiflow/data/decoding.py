"""Image files of any kind as one uint8 array of one shape."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from jacobiflow.core.files import check_plain
from jacobiflow.core.hardware import total_memory
from jacobiflow.core.progress import progress_bar
from jacobiflow.core.results import JacobiflowError, one_line

Pixels = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]
Fit = Literal["crop", "stretch", "pad"]
Encoded = Path | bytes | Pixels  # a file, the content of one, or pixels [H, W] or [H, W, C]

# Limits per image: a few bytes can claim any size, and memory and time follow the claim. The worst images
# within these limits take about 4 seconds and 0.8 GB.
MAX_PIXELS = 40_000_000
SLOW = {"WEBP": 20_000_000, "AVIF": 20_000_000, "JPEG2000": 4_000_000}
LARGE = 4_000_000  # pixels above which images are decoded one at a time, to bound their memory
ALONE = threading.Lock()
MAX_BYTES = 64 * 2**30  # of one array, on machines with more memory than that

# Raster formats only, of those that this Pillow has: it passes some others (EPS) to external programs.
Image.init()
KNOWN = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
FORMATS = tuple(name for name in KNOWN if name in Image.OPEN)
SUFFIXES = {".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff"}
SUFFIXES |= {".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif"}
VALIDATION = ("validation", "valid", "val", "test")  # names of held-out splits, the first that exists counts
GREY = ("1", "L", "LA")  # Pillow's modes
CHUNK = 512  # images that wait for a thread at a time


class DataError(JacobiflowError, ValueError):
    """Data that is missing or cannot be used. The message is one line that says what to do."""


@contextmanager
def data_errors(problem: str, advice: str) -> Iterator[None]:
    """Report any error in one line. Damaged data makes other libraries raise almost anything."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{problem} ({one_line(error)[:300]}): {advice}") from None


@dataclass(frozen=True)
class Form:
    """The shape that images are brought to. None: as they are, which is one size, and grey if all are."""

    size: int | None
    channels: int | None
    fit: Fit
    like: tuple[int, int] | None = None  # the height and width that images must have if size is None


@dataclass(frozen=True)
class Images:
    """Images, uint8 [N, C, H, W], their labels, int64 [N] or None, and the names of the classes, where known."""

    pixels: Tensor
    labels: Tensor | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pixels)


class Part(ABC):
    """A set of images that are read on demand."""

    name: str
    classes: tuple[str, ...] = ()  # their names, where known

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def labels(self) -> npt.NDArray[Any]:
        """One class number per image; DataError if there are none."""

    @abstractmethod
    def item(self, row: int) -> tuple[str, Encoded]:
        """The name and the content of an image."""

    def read(self, rows: Rows, form: Form, labels: Tensor | None) -> tuple[Images, list[str]]:
        """The images `rows`, in that order, and a line per image that cannot be read. labels: of all images."""
        images, failed, kept = list[Pixels](), list[str](), list[int]()
        channels, like, first = 0, form.like, "the training images are"
        shown = {"total": len(rows), "desc": f"reading {self.name}", "unit": "image"}
        with (
            warnings.catch_warnings(),  # here, not in the threads: it changes the whole process
            ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
            progress_bar(**shown, disable=not sys.stderr.isatty()) as bar,
        ):
            warnings.filterwarnings("ignore", module="PIL")  # what matters is an error or checked here
            chunks = (rows[i : i + CHUNK].tolist() for i in range(0, len(rows), CHUNK))
            found = chain.from_iterable(pool.map(partial(self._decoded, form=form), chunk) for chunk in chunks)
            for row, (name, image) in zip(rows, found, strict=True):
                bar.update()
                if isinstance(image, str):
                    failed.append(f"{name} ({image})")
                    continue
                height, width, colours = image.shape
                if like is None:
                    like, first = (height, width), f"{name} is"
                if like != (height, width):
                    sizes = f"{first} {like[1]} x {like[0]} pixels and {name} is {width} x {height}"
                    raise DataError(f"{self.name}: {sizes}: ask for an image size, or give all images the same")
                if colours > channels:  # one colour image makes all of them colour
                    channels = colours
                    check_memory(len(rows) * image.size, f"{self.name} ({len(rows)} images)")
                images.append(image)
                kept.append(row)
        size = like or (form.size or 0,) * 2
        pixels: Pixels = np.empty((len(images), channels or form.channels or 0, *size), dtype=np.uint8)
        for i in reversed(range(len(images))):
            pixels[i] = images.pop().transpose(2, 0, 1)  # and frees it: there is no second dataset
        return Images(torch.from_numpy(pixels), None if labels is None else labels[kept]), failed

    def _decoded(self, row: int, form: Form) -> tuple[str, Pixels | str]:
        """The name and the pixels of an image, or the reason why it cannot be read."""
        name, content = self.item(row)
        try:
            return name, decode(content, form)
        except UnidentifiedImageError:
            return name, "not a readable image"
        except Exception as error:  # damaged files make decoders raise almost anything
            return name, one_line(error)


def check_memory(count: int, what: str) -> None:
    """DataError for arrays of more bytes than this machine can hold."""
    limit = min(MAX_BYTES, total_memory())
    if count > limit:
        sizes = f"{count / 1e9:,.1f} GB of memory, the limit is {limit / 1e9:,.1f} GB"
        raise DataError(f"{what} would take {sizes}: use fewer or smaller images")


def look(source: Encoded) -> tuple[int, int, int]:
    """Width, height and channels (1 or 3) of an image, from its header; ValueError if it has none."""
    with opened(source) as picture:
        return *picture.size, 1 if picture.mode in GREY or picture.mode.startswith("I") else 3


def opened(source: Encoded) -> Image.Image:
    """An image of which only the header is read."""
    if isinstance(source, np.ndarray):
        return Image.fromarray(source)
    if isinstance(source, Path):
        check_plain(source)
    return Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)


def decode(source: Encoded, form: Form) -> Pixels:
    """One image as [H, W, C]: its first frame, upright, 8 bit, without transparency."""
    with opened(source) as picture:
        (width, height), most = picture.size, SLOW.get(picture.format or "", MAX_PIXELS)
        if width * height > most:
            raise ValueError(f"{width} x {height} pixels are too many, {most:,} is the most")
        with ALONE if width * height > LARGE else nullcontext():
            picture.load()
            with suppress(Exception):  # damaged EXIF data does not damage the pixels
                ImageOps.exif_transpose(picture, in_place=True)
            image = flatten(picture)
            if form.channels is not None:
                image = image.convert("L" if form.channels == 1 else "RGB")
            if form.size is not None and image.size != (form.size, form.size):
                image = square(image, form.size, form.fit)
    pixels: Pixels = np.asarray(image)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def flatten(picture: Image.Image) -> Image.Image:
    """An image of any mode as 8-bit grey (L) or RGB. 16 bit is scaled; transparency becomes white."""
    if picture.mode.startswith("I"):  # 16-bit files open as I;16, or as I, depending on the format
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("pixels beyond 16 bit: save it with 8 or 16 bit")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 65535 / 257 = 255
    if picture.mode == "F":
        raise ValueError("float pixels have no known range: save it with 8 or 16 bit")
    grey = picture.mode in GREY
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("L" if grey else "RGB")


def square(picture: Image.Image, size: int, fit: Fit) -> Image.Image:
    """An image as size x size: its centre ("crop"), all of it ("stretch"), or with black borders ("pad")."""
    resize, (width, height) = partial(picture.resize, resample=Image.Resampling.LANCZOS), picture.size
    if fit == "stretch":
        return resize((size, size))
    if fit == "crop":
        # Resizing a box equals resizing the image and then cropping, but is cheap for thin strips too.
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return resize((size, size), box=(left, top, left + side, top + side))
    inner_width, inner_height = (max(1, round(side * size / max(width, height))) for side in (width, height))
    sheet = Image.new(picture.mode, (size, size))
    sheet.paste(resize((inner_width, inner_height)), ((size - inner_width) // 2, (size - inner_height) // 2))
    return sheet
