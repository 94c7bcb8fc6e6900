"""Grids of samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from torch import Tensor

from jacobiflow.core.pictures import image_grid
from jacobiflow_lab.analysis.plots import Sheet

WIDTH_INCHES = 11.0  # of a row of grids


def grids(path: Path, panels: Mapping[str, Tensor], *, columns: int, across: int, title: str = "") -> None:
    """Grids of uint8 pictures beside each other, each under its name."""
    across = min(across, len(panels))
    pages = {
        name: np.asarray(image_grid(pixels / 127.5 - 1, columns=columns).convert("RGB"))
        for name, pixels in panels.items()
    }
    height, width, _ = next(iter(pages.values())).shape
    size = (WIDTH_INCHES / across, WIDTH_INCHES / across * height / width + 0.4)
    with Sheet(path, rows=-(-len(pages) // across), columns=across, size=size, title=title) as sheet:
        for ax in sheet.axes.flat:
            ax.set_axis_off()
        for ax, (name, picture) in zip(sheet.axes.flat, pages.items(), strict=False):
            ax.imshow(picture, interpolation="nearest")
            ax.set_title(name)
