"""Encoded pictures of any kind as one uint8 array of one shape."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError
from tqdm import tqdm  # type: ignore[import-untyped, unused-ignore]

from jacobiflow.core.hardware import memory
from jacobiflow.core.records import check_plain
from jacobiflow.data.config import DataError, Fit

Pixels = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.int64]
Encoded = Path | bytes | Pixels  # a file, the content of one, or pixels [H, W] or [H, W, C]

# Of one picture: a few bytes can claim any size, and memory and time follow the claim. The worst pictures of
# these sizes take about 4 seconds and 0.8 GB.
MAX_PIXELS = 40_000_000
SLOW = {"WEBP": 20_000_000, "AVIF": 20_000_000, "JPEG2000": 4_000_000}
LARGE = 4_000_000  # pixels from which on pictures are decoded one after the other, to bound their memory
MAX_BYTES = 64 * 2**30  # of one array, on machines with more memory than that

# Only raster formats: Pillow would hand some of the others (EPS) to external programs.
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM", "JPEG2000", "AVIF")
# fmt: off
SUFFIXES = frozenset((
    ".png", ".jpg", ".jpeg", ".jpe", ".webp", ".bmp", ".gif", ".tif", ".tiff",
    ".ppm", ".pgm", ".pbm", ".pnm", ".jp2", ".avif",
))
# fmt: on

CHUNK = 512  # encoded pictures in memory at a time


@dataclass(frozen=True)
class Form:
    """The shape that pictures are brought to; None: as they are."""

    size: int | None
    channels: int | None
    fit: Fit
    like: tuple[int, int] | None = None  # height and width that pictures must have if size is None

    def following(self, pixels: Pixels) -> Form:
        """This form, with what it left open as it is in `pixels` [N, C, H, W]."""
        _, channels, height, width = pixels.shape
        return replace(self, channels=channels, like=(height, width))


@dataclass(frozen=True)
class Pictures:
    """Pixels [M, C, H, W] of the rows `kept` [M], and a line on each picture that could not be read."""

    pixels: Pixels
    kept: Rows
    failed: list[str]


class Part(Protocol):
    """A set of pictures that are read when they are asked for."""

    name: str

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, where they are known."""

    def __len__(self) -> int: ...

    def labels(self) -> npt.NDArray[Any]:
        """One class number a picture; a DataError if there are none."""

    def read(self, rows: Rows, form: Form) -> Pictures:
        """The pictures `rows`, in that order."""


def check_memory(count: int, what: str) -> None:
    """Refuse arrays of more bytes than this machine can hold, before anything is allocated."""
    limit = min(MAX_BYTES, memory())
    if count > limit:
        raise DataError(
            f"{what} would take {count / 1e9:,.1f} GB of memory and {limit / 1e9:,.1f} GB is the most: "
            "use fewer or smaller images"
        )


def decode_all(items: Iterable[tuple[str, Encoded]], rows: Rows, form: Form, source: str) -> Pictures:
    """Decode pictures in parallel; `items` are their names and contents, one for each of `rows`.

    Few are held in encoded form at a time. Those that cannot be read are left out and named in
    `failed`. With form.size None all must have one size; with form.channels None the result is grey
    if all pictures are.
    """
    stack, failed, kept = _Stack(len(rows), form, source), [], []
    tail = iter(items)
    with (
        warnings.catch_warnings(),  # here, not in the threads: it changes the whole process
        ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool,
        tqdm(total=len(rows), desc=f"reading {source}", unit="image", disable=not sys.stderr.isatty()) as bar,
    ):
        warnings.filterwarnings("ignore", module="PIL")  # what matters is an error or checked here
        done = 0
        while chunk := list(islice(tail, CHUNK)):
            for (name, _), result in zip(chunk, _attempt_all(pool, chunk, form), strict=True):
                if isinstance(result, str):
                    failed.append(f"{name} ({result})")
                else:
                    stack.add(name, result)
                    kept.append(rows[done])
                done += 1
            bar.update(len(chunk))
    return Pictures(stack.pixels(), np.array(kept, dtype=np.int64), failed)


def _attempt_all(
    pool: ThreadPoolExecutor, chunk: list[tuple[str, Encoded]], form: Form
) -> Iterator[Pixels | str]:
    """Each picture's pixels, or the reason why there are none."""

    def attempt(item: tuple[str, Encoded]) -> Pixels | str:
        try:
            return decode(item[1], form)
        except UnidentifiedImageError:
            return "not a readable image"
        except Exception as error:  # damaged files make decoders raise almost anything
            return " ".join(str(error).split()) or type(error).__name__

    return pool.map(attempt, chunk)


class _Stack:
    """Pictures [H, W, C] gathered into [N, C, H, W], allocated once; grey becomes colour if it must."""

    def __init__(self, count: int, form: Form, source: str) -> None:
        self.count, self.form, self.source, self.filled = count, form, source, 0
        self.like, self.first = form.like, "the training images are"
        self.buffer: Pixels | None = None

    def add(self, name: str, picture: Pixels) -> None:
        height, width, channels = picture.shape
        if self.like is None:
            self.like, self.first = (height, width), f"{name} is"
        if self.like != (height, width):
            raise DataError(
                f"{self.source}: {self.first} {self.like[1]} x {self.like[0]} pixels and {name} is "
                f"{width} x {height}: ask for an image size, or give all images the same"
            )
        if self.buffer is None or channels > self.buffer.shape[1]:
            check_memory(self.count * picture.size, f"{self.source} ({self.count} images)")
            wider: Pixels = np.empty((self.count, channels, height, width), dtype=np.uint8)
            if self.buffer is not None:
                wider[: self.filled] = self.buffer[: self.filled]
            self.buffer = wider
        self.buffer[self.filled] = picture.transpose(2, 0, 1)
        self.filled += 1

    def pixels(self) -> Pixels:
        if self.buffer is None:
            height, width = self.like or (self.form.size or 0,) * 2
            return np.empty((0, self.form.channels or 0, height, width), dtype=np.uint8)
        return self.buffer[: self.filled]


def decode(source: Encoded, form: Form) -> Pixels:
    """One picture as [H, W, C]: its first frame, upright, of 8 bit, without transparency."""
    if isinstance(source, np.ndarray):
        return shape(Image.fromarray(source), form)
    if isinstance(source, Path):
        check_plain(source, "it is not a plain file")
    stream = BytesIO(source) if isinstance(source, bytes) else source
    with Image.open(stream, formats=_formats()) as picture:  # reads the header only
        (width, height), most = picture.size, SLOW.get(picture.format or "", MAX_PIXELS)
        if width * height > most:
            kind = f" of a {picture.format} file" if most < MAX_PIXELS else ""
            raise ValueError(f"{width} x {height} pixels{kind} are too many, {most:,} is the most")
        with _alone if width * height > LARGE else nullcontext():
            picture.load()
            with suppress(Exception):  # damaged EXIF data does not damage the pixels
                ImageOps.exif_transpose(picture, in_place=True)
            return shape(picture, form)


_alone = threading.Lock()


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(f for f in FORMATS if f in Image.OPEN)


def shape(picture: Image.Image, form: Form) -> Pixels:
    """A picture in the channels and size of `form`, as [H, W, C]."""
    picture = flatten(picture)
    if form.channels is not None:
        picture = picture.convert("L" if form.channels == 1 else "RGB")
    if form.size is not None and picture.size != (form.size, form.size):
        picture = square(picture, form.size, form.fit)
    pixels: Pixels = np.asarray(picture)
    return pixels[..., None] if pixels.ndim == 2 else pixels


def flatten(picture: Image.Image) -> Image.Image:
    """A picture of any mode as 8-bit grey (L) or RGB: 16 bit is scaled, transparency lies over white."""
    if picture.mode.startswith("I"):  # 16-bit files open as I;16, or as I, depending on the format
        values = np.asarray(picture).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("pixels beyond 16 bit: save it with 8 or 16 bit")
        return Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 65535 / 257 = 255
    if picture.mode == "F":
        raise ValueError("float pixels have no known range: save it with 8 or 16 bit")
    grey = picture.mode in ("1", "L", "LA")
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
    return picture.convert("L" if grey else "RGB")


def square(picture: Image.Image, size: int, fit: Fit) -> Image.Image:
    """A picture as size x size (Lanczos).

    "crop": the short side becomes `size` and the centre is kept; "stretch": both sides become `size`;
    "pad": the long side becomes `size` and the rest is black, the same on both sides.
    """
    width, height = picture.size
    if fit == "stretch":
        return picture.resize((size, size), Image.Resampling.LANCZOS)
    if fit == "crop":
        # Resizing from a box equals resizing all and then cropping, but a thin strip costs no more.
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        return picture.resize(
            (size, size), Image.Resampling.LANCZOS, box=(left, top, left + side, top + side)
        )
    scale = size / max(width, height)
    inner = (max(1, round(width * scale)), max(1, round(height * scale)))
    sheet = Image.new(picture.mode, (size, size))
    corner = ((size - inner[0]) // 2, (size - inner[1]) // 2)
    sheet.paste(picture.resize(inner, Image.Resampling.LANCZOS), corner)
    return sheet
