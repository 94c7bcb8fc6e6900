"""Data sources by one string: an npz file (for now)."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from jacobiflow.core.types import JacobiflowError


class DataError(JacobiflowError, ValueError):
    """Data that is not there or cannot be used."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how they are brought to the model's shape."""

    source: str = ""


@dataclass(frozen=True)
class Images:
    """uint8 images [N, C, H, W] and their labels [N], or none."""

    pixels: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)


def load_images(config: DataConfig) -> tuple[Images, Images]:
    path = Path(config.source)
    with np.load(path, allow_pickle=False) as z:
        def part(name: str) -> Images:
            x = torch.from_numpy(z[f"x_{name}"])
            x = x[:, None] if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
            y = torch.from_numpy(z[f"y_{name}"]).long() if f"y_{name}" in z else None
            return Images(x, y)
        return part("train"), part("test")
