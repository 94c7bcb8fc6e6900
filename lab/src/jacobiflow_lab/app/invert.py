"""A digit that a visitor draws or uploads, encoded into noise and decoded again."""

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

from jacobiflow.core.results import Decoded
from jacobiflow.data.decoding import Form, Images, Pixels, decode
from jacobiflow.data.transforms import prepare
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.app.models import ModelRegistry, UserError, chosen_labels, chosen_plan
from jacobiflow_lab.app.visitors import Monitor
from jacobiflow_lab.metrics.likelihood import noise_of

MAX_FILE_BYTES = 10 * 2**20
MAX_SIDE_PIXELS = 6000
MAX_DRAWING_CHARACTERS = 2**20
MAX_CANVAS_PIXELS = 1000  # per side
DIGIT_SHARE = 20 / 28  # of the image's side, as in MNIST
MAX_COMPARED_LABELS = 20


@dataclass(frozen=True, kw_only=True)
class InversionResult:
    """An image x [1, ...] as in training, its noise z, and the image that z decodes to."""

    model: str
    x: Tensor
    z: Tensor  # in the shape of data
    decoded: Decoded
    log_prob: float  # nats
    bits_per_dim: float
    by_label: tuple[float, ...]  # log-likelihood per label, if there are few labels
    inverted: bool  # whether dark and light were exchanged

    @property
    def error(self) -> Tensor:
        """|difference| of the image and its reconstruction."""
        return (self.decoded.x - self.x).abs()


def drawn_pixels(value: object, flow: Flow) -> Pixels:
    """The strokes of a drawing (a PNG as a data URL), scaled and centred as MNIST's digits are."""
    if not value:
        raise UserError("the canvas is empty: draw something first")
    kind, _, code = str(value)[:MAX_DRAWING_CHARACTERS].partition(",")
    try:
        if kind != "data:image/png;base64":
            raise ValueError
        with Image.open(io.BytesIO(base64.b64decode(code, validate=True)), formats=("PNG",)) as drawing:
            if max(drawing.size) > MAX_CANVAS_PIXELS:
                raise ValueError
            ink = drawing.convert("RGBA").getchannel("A")
    except Exception:  # the page never sends such values
        raise UserError("the drawing cannot be read: clear the canvas and draw again") from None
    box = ink.getbbox()
    if box is None:
        raise UserError("the canvas is empty: draw something first")
    digit = ink.crop(box)
    side = round(max(digit.size) / DIGIT_SHARE)
    centred = Image.new("L", (side, side))
    centred.paste(digit, ((side - digit.width) // 2, (side - digit.height) // 2))
    return _resized(np.asarray(centred)[..., None], flow)


def uploaded_pixels(path: str | Path | None, flow: Flow) -> tuple[Pixels, bool]:
    """An uploaded image in the flow's size, and whether dark and light were exchanged.

    Grey models have light ink on a dark ground, so an image with a light border is inverted.
    """
    if not path:
        raise UserError("there is no image: upload one first")
    if not Path(path).is_file():  # reading a device or a pipe never ends
        raise UserError("the image is no longer here: upload it again")
    channels = _image_shape(flow)[0]
    try:
        _check_size(Path(path))
        pixels = decode(Path(path), Form(size=None, channels=channels, fit="pad"))
    except UserError:
        raise
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise UserError("this is not a readable image: upload a PNG, JPEG or WebP") from None
    except MemoryError:
        raise UserError("the image is too large for this machine: upload a smaller one") from None
    except Exception as error:  # damaged files make decoders raise almost anything
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise UserError(f"the image cannot be read ({reason}): upload another one") from None
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    inverted = channels == 1 and float(border.mean()) > 127.5
    return _resized(255 - pixels if inverted else pixels, flow), inverted


def _check_size(path: Path) -> None:
    size, most = path.stat().st_size, MAX_SIDE_PIXELS
    if size > MAX_FILE_BYTES:
        raise UserError(f"the file has {size / 2**20:.0f} MB: upload at most {MAX_FILE_BYTES // 2**20} MB")
    with Image.open(path) as header:
        if max(header.size) > most:
            raise UserError(f"the image has {header.width} x {header.height} pixels: upload at most {most} x {most}")


def _image_shape(flow: Flow) -> tuple[int, ...]:
    assert flow.image_shape is not None, "the registry holds models of images only"
    return flow.image_shape


def _resized(pixels: Pixels, flow: Flow) -> Pixels:
    """Pixels [H, W, C] of any size as the flow's [C, H, W]."""
    channels, _, side = _image_shape(flow)
    form = Form(size=side, channels=channels, fit="pad")
    return decode(pixels[..., 0] if pixels.shape[2] == 1 else pixels, form).transpose(2, 0, 1)


def _as_in_training(pixels: Pixels, flow: Flow) -> Tensor:
    """Pixels [C, H, W] as data [1, ...], with the noise that training adds."""
    draw = torch.Generator().manual_seed(0)
    images, first = Images(torch.tensor(pixels)[None]), torch.zeros(1, dtype=torch.long)
    x = prepare(images, first, draw, noise=noise_of(flow), noise_std=flow.noise_std).x
    return x.reshape(1, *flow.data_shape).to(next(flow.parameters()))


def invert(
    models: ModelRegistry,
    *,
    model: object,
    drawing: object = None,
    upload: str | Path | None = None,
    label: object = None,
    plan: object = "selective",
    tol: object = None,
    init: object = None,
    monitor: Monitor = Monitor(),  # noqa: B008
) -> InversionResult:
    """Encode a drawing (a PNG as a data URL) or an upload (a file), then decode the noise."""
    if model not in models.invertible:
        raise UserError(f"choose a model of images: {' or '.join(models.invertible) or 'there is none'}")
    flow = models[model]
    name, options = chosen_plan(plan, tol, init)
    labels = chosen_labels(label, flow)
    condition: dict[str, Any] = {"labels": labels[0]} if labels else {}
    if drawing is None:
        pixels, inverted = uploaded_pixels(upload, flow)
    else:
        pixels, inverted = drawn_pixels(drawing, flow), False
    x = _as_in_training(pixels, flow)
    with models.lock, torch.no_grad():
        monitor.report(0.1, "encoding")
        z = flow.encode(x, **condition).z
        figures: dict[str, Any] = {
            "log_prob": float(flow.log_prob(x, **condition)),
            "bits_per_dim": float(flow.bits_per_dim(x, **condition)),
            "by_label": (),
        }
        if 1 < flow.num_classes <= MAX_COMPARED_LABELS:
            monitor.report(0.4, "computing the likelihood under each label")
            every = torch.arange(flow.num_classes)
            copies = x.expand(len(every), *flow.data_shape)
            figures["by_label"] = tuple(flow.log_prob(copies, every).tolist())
        monitor.report(0.7, f"decoding, {name}")
        decoded = flow.decode(z, name, check=True, warn=False, **condition, **options)
        z = flow.from_sequence(z.reshape(flow.to_sequence(x).shape))
    return InversionResult(model=str(model), x=x, z=z, decoded=decoded, inverted=inverted, **figures)
