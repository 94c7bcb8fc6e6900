"""Differentiable augmentation (Zhao et al., 2020), so that a discriminator cannot memorize a small data set.

Real and generated images are both augmented.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFT_FRACTION = 8  # images move by up to 1/8 of their side


def augment(x: Tensor, draw: torch.Generator) -> Tensor:
    """Random brightness, saturation, contrast and position of each image [B, C, H, W]."""
    n = len(x)
    bright, colour, contrast = (torch.rand(3, n, 1, 1, 1, generator=draw)).to(x)
    x = x + (bright - 0.5)
    if x.shape[1] > 1:
        grey = x.mean(1, keepdim=True)
        x = grey + (x - grey) * 2 * colour
    middle = x.mean((1, 2, 3), keepdim=True)
    return shift(middle + (x - middle) * (contrast + 0.5), draw)


def shift(x: Tensor, draw: torch.Generator) -> Tensor:
    """Each image moved by up to an eighth of its side and padded with zeros."""
    n, _, height, width = x.shape
    far = max(1, height // SHIFT_FRACTION)
    down, right = torch.randint(2 * far + 1, (2, n), generator=draw).to(x.device)
    padded = F.pad(x, (far, far, far, far))
    rows = down[:, None] + torch.arange(height, device=x.device)  # [B, H]
    columns = right[:, None] + torch.arange(width, device=x.device)
    which = torch.arange(n, device=x.device)[:, None, None]
    found = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2)
