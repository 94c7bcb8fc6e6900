"""Training batches from stored pixels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jacobiflow.core.rows import Noise
from jacobiflow.data.decoding import Images


class Batch(NamedTuple):
    """Images in data space, and their labels (-1: dropped) or None."""

    x: Tensor
    labels: Tensor | None
    wrong: Tensor | None = None  # a wrong label of each image, for `training.contrast`


def prepare(
    images: Images,
    index: Tensor,
    draw: torch.Generator,
    *,
    noise: Noise = "none",
    noise_std: float = 0.0,
    flip: bool = False,
    label_drop: float = 0.0,
) -> Batch:
    """The images `index` in about [-1, 1], with noise, flips and dropped labels.

    "gaussian": pixel / 127.5 - 1 plus noise of standard deviation noise_std.
    "dequantize": (pixel + u) / 128 - 1, u uniform in [0, 1).
    "binary": 1 where pixel > 127 else 0, plus u, minus 1.
    """
    pixels, n = images.pixels[index].float(), len(index)
    if flip:
        mirror = torch.rand(n, generator=draw) < 0.5
        pixels = torch.where(mirror[:, None, None, None], pixels.flip(-1), pixels)
    if noise == "dequantize":
        x = (pixels + torch.rand(pixels.shape, generator=draw)) / 128 - 1
    elif noise == "binary":
        x = (pixels > 127).float() + torch.rand(pixels.shape, generator=draw) - 1
    else:
        x = pixels / 127.5 - 1
    if noise == "gaussian":
        x = x + noise_std * torch.randn(x.shape, generator=draw)
    labels = None if images.labels is None else images.labels[index]
    if labels is not None and label_drop:
        labels = torch.where(torch.rand(n, generator=draw) < label_drop, -1, labels)
    return Batch(x, labels)


def wrong_labels(x: Tensor, labels: Tensor, means: Tensor, draw: torch.Generator) -> Tensor:
    """A wrong class for each image [n]: one of the three whose mean images [classes, pixels] are nearest to it."""
    apart = torch.cdist(x.flatten(1), means).scatter(1, labels[:, None], torch.inf)
    near = apart.topk(min(3, len(means) - 1), largest=False).indices
    return near.gather(1, torch.randint(near.shape[1], (len(x), 1), generator=draw))[:, 0]
