"""A picture that somebody draws or uploads, through the flow and back."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from jacobiflow.core.types import Decoded
from jacobiflow.data.decoding import Form, Pixels, decode, shape
from jacobiflow.data.pictures import as_images
from jacobiflow.data.sources import Images
from jacobiflow.data.transforms import prepare
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.app.actions import SWEPT, Check, Progress, checked_clock, silent, unchecked
from jacobiflow_lab.app.models import (
    LARGEST_SEED,
    LARGEST_TOL,
    Refused,
    Shelf,
    chosen_init,
    chosen_labels,
    chosen_plan,
    number,
    training_noise,
    whole,
)

LARGEST_FILE = 10 * 2**20  # bytes
LARGEST_SIDE = 6000  # pixels
LARGEST_DRAWING = 2**20  # characters
LARGEST_CANVAS = 1000  # pixels
INK = 20 / 28  # of the frame that a drawing fills, as MNIST's digits do
COMPARED = 20  # classes, at most, under which a picture's likelihood is shown


@dataclass(frozen=True, kw_only=True)
class Inverted:
    """A picture x [1, ...] as training would show it, its noise z, and what decoding z gives."""

    model: str
    x: Tensor
    z: Tensor  # as data, for showing
    back: Tensor
    decoded: Decoded
    log_prob: float  # nats
    bits_per_dim: float
    by_label: tuple[float, ...]  # log-likelihood under each label, if there are a few
    negative: bool  # whether dark and light were exchanged

    @property
    def shares(self) -> list[float]:
        """How probable each label is, by Bayes' rule with equal priors."""
        return torch.tensor(self.by_label, dtype=torch.float64).softmax(0).tolist()

    @property
    def largest(self) -> float:
        """Error of the reconstruction, largest |difference|."""
        return float((self.back - self.x).abs().max())

    @property
    def mean(self) -> float:
        """Error of the reconstruction, mean |difference|."""
        return float((self.back - self.x).abs().mean())


def drawn_pixels(value: object, flow: Flow) -> Pixels:
    """The strokes of a drawing, in the frame that digits have, from a PNG as a data address."""
    if not value:
        raise Refused("the canvas is empty: draw something first")
    kind, _, code = str(value)[:LARGEST_DRAWING].partition(",")
    try:
        if kind != "data:image/png;base64":
            raise ValueError
        with Image.open(io.BytesIO(base64.b64decode(code, validate=True)), formats=("PNG",)) as drawing:
            if max(drawing.size) > LARGEST_CANVAS:
                raise ValueError
            ink: Pixels = np.asarray(drawing.convert("RGBA"))[..., 3]
    except Exception:  # a page does not send such things
        raise Refused("the drawing cannot be read: clear the canvas and draw again") from None
    rows, columns = (np.flatnonzero(ink.max(axis)) for axis in (1, 0))
    if not len(rows):
        raise Refused("the canvas is empty: draw something first")
    digit = ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    frame = round(max(digit.shape) / INK)
    sheet = np.zeros((frame, frame), dtype=np.uint8)
    top, left = ((frame - side) // 2 for side in digit.shape)
    sheet[top : top + digit.shape[0], left : left + digit.shape[1]] = digit
    return _formed(sheet, flow)


def uploaded_pixels(path: str | Path | None, flow: Flow) -> tuple[Pixels, bool]:
    """An uploaded picture in the flow's size, and whether it was dark on light and was turned over.

    Grey models have light ink on a dark ground; a picture with a light border is the other way round.
    """
    if not path:
        raise Refused("upload a picture first")
    if not Path(path).is_file():  # devices and pipes never end
        raise Refused("the picture is not here any more: upload it again")
    try:
        size = Path(path).stat().st_size
        if size > LARGEST_FILE:
            raise Refused(f"the file has {size / 2**20:.0f} MB: {LARGEST_FILE // 2**20} MB is the most")
        with Image.open(path) as header:
            if max(header.size) > LARGEST_SIDE:
                raise Refused(
                    f"the picture has {header.width} x {header.height} pixels: "
                    f"{LARGEST_SIDE} x {LARGEST_SIDE} is the most"
                )
        pixels = decode(Path(path), Form(size=None, channels=_channels(flow), fit="pad"))
    except Refused:
        raise
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise Refused("this is not a picture that can be read: upload a PNG, JPEG or WebP") from None
    except MemoryError:
        raise Refused("the picture is too large for this machine: upload a smaller one") from None
    except Exception as error:  # damaged files make decoders raise almost anything
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise Refused(f"the picture cannot be read ({reason}): upload another") from None
    edge = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    negative = _channels(flow) == 1 and float(edge.mean()) > 127.5
    return _formed(255 - pixels if negative else pixels, flow), negative


def _channels(flow: Flow) -> int:
    return flow.data_shape[0] if len(flow.data_shape) == 3 else 1


def _formed(pixels: Pixels, flow: Flow) -> Pixels:
    """[H, W, C] of any size as the flow's [C, H, W]."""
    side = _shape(flow)[-1]
    picture = Image.fromarray(pixels[..., 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels)
    found: Pixels = shape(picture, Form(size=side, channels=_channels(flow), fit="pad")).transpose(2, 0, 1)
    return found


def _shape(flow: Flow) -> tuple[int, ...]:
    found = as_images(torch.empty(1, *flow.data_shape))
    assert found is not None, "the shelf holds pictures only"
    return tuple(found.shape[1:])


def invert(
    shelf: Shelf,
    *,
    model: object,
    drawing: object = None,
    upload: str | Path | None = None,
    label: object = None,
    plan: object = "selective",
    tol: object = None,
    init: object = None,
    seed: object = 0,
    progress: Progress = silent,
    check: Check = unchecked,
) -> Inverted:
    """Encode a drawing (a PNG as a data address) or an upload (a file), then decode what came out."""
    if model not in shelf.invertible:
        raise Refused(f"choose a model of pictures: {' or '.join(shelf.invertible)}")
    flow = shelf[model]
    name, cycle = chosen_plan(plan), chosen_labels(label, flow)
    draw = torch.Generator().manual_seed(whole(seed, "Seed", 0, LARGEST_SEED))
    given: dict[str, Any] = {"labels": cycle[0]} if cycle else {}
    how: dict[str, Any] = {}
    if name in SWEPT:
        how = {"tol": number(tol, "Tolerance", 0.0, LARGEST_TOL), "init": chosen_init(init)}
    negative = False
    if drawing is None:
        pixels, negative = uploaded_pixels(upload, flow)
    else:
        pixels = drawn_pixels(drawing, flow)
    images = Images(torch.tensor(pixels)[None])
    like, std = next(flow.parameters()), getattr(flow.config, "noise_std", 0.0)
    batch = prepare(images, torch.zeros(1, dtype=torch.long), draw, noise=training_noise(flow), noise_std=std)
    x = batch.x.reshape(1, *flow.data_shape).to(like)
    with shelf.work, torch.no_grad():
        progress(0.1, "encoding")
        encoded = flow.encode(x, **given)
        log_prob = flow.log_prob(x, **given)
        by_label: tuple[float, ...] = ()
        if 1 < flow.num_classes <= COMPARED:
            progress(0.4, "reading it under each label")
            labels = torch.arange(flow.num_classes)
            by_label = tuple(flow.log_prob(x.expand(len(labels), *flow.data_shape), labels).tolist())
        progress(0.7, f"decoding, {name}")
        if name == "auto":  # tunes now if there is no plan yet
            flow.plan(
                name,
                n=1,
                **given,
                clock=checked_clock(flow, check),
                progress=lambda text: progress(0.7, text),
            )
        decoded = flow.decode(encoded.z, name, check=True, warn=False, **given, **how)
        bits = flow.bits_per_dim(x, **given)
        seen = flow.from_sequence(encoded.z.reshape(1, *flow.to_sequence(x).shape[1:]))
    return Inverted(
        model=str(model),
        x=x,
        z=seen,
        back=decoded.x,
        decoded=decoded,
        log_prob=float(log_prob),
        bits_per_dim=float(bits),
        by_label=by_label,
        negative=negative,
    )
