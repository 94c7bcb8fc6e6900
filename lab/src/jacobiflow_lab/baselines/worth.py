"""Whether a baseline is one: it has to be clearly better than real images whose pixels were shuffled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CLEARLY = 0.7  # of the shuffled images' FID and KID: what a baseline may have at most


def counts(found: Mapping[str, Any], floor: Mapping[str, Any]) -> bool:
    """Whether samples are clearly better than shuffled images, by "fid" and by "kid" of both."""
    return all(found[key] < CLEARLY * floor[key] for key in ("fid", "kid"))


def shuffle_pixels(pixels: Tensor, seed: int = 0) -> Tensor:
    """Each image [N, C, H, W] with its pixels in another order: the same colours, no picture."""
    flat = pixels.flatten(2)
    draw = torch.Generator().manual_seed(seed)
    order = torch.rand(len(flat), 1, flat.shape[2], generator=draw).argsort(2).to(pixels.device)
    return flat.gather(2, order.expand_as(flat)).reshape(pixels.shape)
