"""Changes of images that gradients pass through, so that a discriminator cannot learn few images by heart.

Both real and generated images are changed, after Zhao et al., 2020, Differentiable Augmentation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SHIFT = 8  # an eighth of the side is the farthest that images move


def augment(x: Tensor, draw: torch.Generator) -> Tensor:
    """Brightness, saturation, contrast and place of each image [B, C, H, W], at random."""
    n = len(x)
    bright, colour, contrast = (torch.rand(3, n, 1, 1, 1, generator=draw)).to(x)
    x = x + (bright - 0.5)
    if x.shape[1] > 1:
        grey = x.mean(1, keepdim=True)
        x = grey + (x - grey) * 2 * colour
    middle = x.mean((1, 2, 3), keepdim=True)
    return shift(middle + (x - middle) * (contrast + 0.5), draw)


def shift(x: Tensor, draw: torch.Generator) -> Tensor:
    """Each image moved by up to an eighth of its side, zeros where nothing is left."""
    n, _, height, width = x.shape
    far = max(1, height // SHIFT)
    down, right = torch.randint(2 * far + 1, (2, n), generator=draw).to(x.device)
    padded = F.pad(x, (far, far, far, far))
    rows = down[:, None] + torch.arange(height, device=x.device)  # [B, H]
    columns = right[:, None] + torch.arange(width, device=x.device)
    which = torch.arange(n, device=x.device)[:, None, None]
    found = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2)
