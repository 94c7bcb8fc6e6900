"""Tensors of images as PNG files. Pillow is imported where a picture is made: it is slow to import."""

from __future__ import annotations

import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from jacobiflow.core.arguments import as_int, as_path, instance
from jacobiflow.core.files import write_atomically, write_bytes
from jacobiflow.core.results import nonfinite_rows

if TYPE_CHECKING:
    from PIL import Image

MOST_COLUMNS = 16  # of a grid, unless it is asked for more
MOST_SHOWN = 10_000  # columns that can be asked for
MOST_PIXELS = 100  # of a gap, and for a pixel
SHOWN = 400  # images, at most, of a grid that shows samples
GROUND_GREY = 128  # around the images of a grid
TILE_GREY, CROSS_GREY = 176, 32  # of the tile that stands for a sample that is not finite


def as_images(x: Tensor) -> Tensor | None:
    """Samples as images [N, C, H, W]; None if they are none."""
    if x.ndim != 2:
        return x if x.ndim == 4 and x.shape[1] in (1, 3) else None
    side = math.isqrt(x.shape[1])
    return x.reshape(-1, 1, side, side) if side > 3 and side**2 == x.shape[1] else None


def to_pixels(x: Tensor) -> np.ndarray:
    """Images [N, C, H, W] in [-1, 1] as uint8 [N, H, W, C], clipped; one that is not finite is a crossed-out tile."""
    finite = x.detach().cpu().float().nan_to_num(-1.0).clamp(-1, 1)
    pixels = np.asarray(((finite + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy())
    height, width = pixels.shape[1:3]
    row, column = np.ogrid[:height, :width]
    down, across = row * (width - 1), column * (height - 1)
    off = np.minimum(abs(down - across), abs(down - across[:, ::-1]))  # from the diagonals
    cross = off <= max(1.0, min(height, width) / 12) * max(height, width) / 2  # strokes of a twelfth of the tile
    pixels[nonfinite_rows(x).numpy()] = np.where(cross, CROSS_GREY, TILE_GREY)[..., None]
    return pixels


def image_grid(x: Tensor, *, columns: int, gap: int = 1) -> Image.Image:
    """Images [N, C, H, W] in [-1, 1] as one picture, row by row."""
    from PIL import Image

    pixels = np.pad(to_pixels(x), ((0, -len(x) % columns), (gap, 0), (gap, 0), (0, 0)), constant_values=GROUND_GREY)
    n, h, w, c = pixels.shape
    sheet = pixels.reshape(n // columns, columns, h, w, c).swapaxes(1, 2).reshape(-1, columns * w, c)
    sheet = np.pad(sheet, ((0, gap), (0, gap), (0, 0)), constant_values=GROUND_GREY)
    return Image.fromarray(sheet[..., 0] if c == 1 else sheet)


def save_images(x: Tensor, path: str | Path, *, columns: int | None = None, gap: int = 1, zoom: int = 2) -> None:
    """Write samples in [-1, 1] as one PNG, row by row, enlarged `zoom` times.

    x: images [N, C, H, W], or square grey ones as vectors [N, H * W].
    columns: default: about as many as rows.
    """
    path = as_path("path", path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"images are written as PNG: give a name that ends in .png, not {str(path)!r}")
    write_bytes(path, sheet_bytes(x, columns=columns, gap=gap, zoom=zoom))


def sheet_bytes(x: Tensor, *, columns: int | None = None, gap: int = 1, zoom: int = 2) -> bytes:
    """The PNG that `save_images` writes."""
    instance(Tensor, x, "save_images")
    gap, zoom = as_int("gap", gap, 0, MOST_PIXELS), as_int("zoom", zoom, 1, MOST_PIXELS)
    images = as_images(x)
    if images is None or not len(images):
        wrong = f"samples of shape {list(x.shape)} are no images [N, C, H, W] or [N, H * W]"
        raise ValueError(f"{wrong}: reshape them (x[None] for one image), or save the numbers, as np.save does")
    few = min(MOST_COLUMNS, math.ceil(math.sqrt(len(images))))
    columns = few if columns is None else as_int("columns", columns, 1, MOST_SHOWN)
    picture, stream = image_grid(images, columns=columns, gap=gap), BytesIO()
    picture.resize((picture.width * zoom, picture.height * zoom), resample=0).save(stream, "png")  # the nearest pixel
    return stream.getvalue()


def save_strip(rows: Sequence[tuple[str, Tensor]], path: str | Path, *, title: str = "", shown: int = 10) -> None:
    """Rows of images, each with its caption below it, as one PNG: the same noise decoded by several methods."""
    from PIL import Image, ImageDraw, ImageFont

    images = [as_images(x[:shown]) for _, x in rows]
    pixels = [to_pixels(x) for x in images if x is not None]  # the caller checks that samples are images
    zoom = max(1, round(56 / max(p.shape[2] for p in pixels)))
    font, line, gap = ImageFont.load_default(13), 20, 2
    strips = []
    for p in pixels:
        tiles = p.repeat(zoom, 1).repeat(zoom, 2).repeat(3 // p.shape[3], 3)
        strips.append(np.hstack([*np.pad(tiles, ((0, 0), (gap, gap), (gap, gap), (0, 0)))]))
    texts, top = [title, *(caption for caption, _ in rows)], line if title else 0
    width = max(*(s.shape[1] for s in strips), *(int(font.getlength(text)) + 8 for text in texts))
    sheet = Image.new("RGB", (width, top + sum(len(s) + gap + line for s in strips)), "white")
    draw = ImageDraw.Draw(sheet)
    draw.text((4, 2), title, fill="black", font=font)
    for (caption, _), strip in zip(rows, strips, strict=True):
        sheet.paste(Image.fromarray(strip), (0, top))
        top += len(strip) + gap + line
        draw.text((4, top - line), caption, fill="black", font=font)
    write_atomically(Path(path), lambda name: sheet.save(name, "png"))
