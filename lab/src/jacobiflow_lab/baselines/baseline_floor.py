"""The floor of a useful baseline: real images with shuffled pixels, which it must clearly beat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOST_OF_FLOOR = 0.7  # a baseline counts if its FID and KID are below this share of the floor's


def counts(scores: Mapping[str, Any], floor: Mapping[str, Any]) -> bool:
    """Whether samples clearly beat shuffled images, by both "fid" and "kid"."""
    return all(scores[key] < MOST_OF_FLOOR * floor[key] for key in ("fid", "kid"))


def shuffle_pixels(pixels: Tensor, seed: int = 0) -> Tensor:
    """Images [N, C, H, W], each with its pixels in a random order: the same colours, no picture."""
    flat = pixels.flatten(2)
    draw = torch.Generator().manual_seed(seed)
    order = torch.rand(len(flat), 1, flat.shape[2], generator=draw).argsort(2).to(pixels.device)
    return flat.gather(2, order.expand_as(flat)).reshape(pixels.shape)
