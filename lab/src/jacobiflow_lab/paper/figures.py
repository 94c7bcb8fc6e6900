"""Pictures of the report that `analysis.plots` does not draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jacobiflow_lab.analysis.plots import BLUE, COLOURS, GREY, RED, Sheet

WIDTH_INCHES = 11.0  # of a row of grids


def tile(pixels: Tensor, columns: int) -> np.ndarray:
    """uint8 images [N, C, H, W] as one picture [H', W', 3], in rows on white with gaps of one pixel."""
    n, _, height, width = pixels.shape
    rows = -(-n // columns)
    page = torch.full((rows * columns, 3, height + 1, width + 1), 255, dtype=torch.uint8)
    page[:n, :, :height, :width] = pixels.cpu()
    page = page.reshape(rows, columns, 3, height + 1, width + 1).permute(0, 3, 1, 4, 2)
    return np.asarray(page.reshape(rows * (height + 1), columns * (width + 1), 3)[:-1, :-1])


def grids(path: Path, panels: Mapping[str, Tensor], *, columns: int, across: int, title: str = "") -> None:
    """Grids of uint8 pictures beside each other, each under its name."""
    across = min(across, len(panels))
    pages = {name: tile(pixels, columns) for name, pixels in panels.items()}
    height, width, _ = next(iter(pages.values())).shape
    size = (WIDTH_INCHES / across, WIDTH_INCHES / across * height / width + 0.4)
    with Sheet(path, rows=-(-len(pages) // across), columns=across, size=size, title=title) as sheet:
        for ax in sheet.axes.flat:
            ax.set_axis_off()
        for ax, (name, picture) in zip(sheet.axes.flat, pages.items(), strict=False):
            ax.imshow(picture, interpolation="nearest")
            ax.set_title(name)


def quality_and_time(
    path: Path,
    taus: Sequence[float],
    quality: tuple[str, Sequence[float]],
    seconds: Sequence[float],
    *,
    exact: tuple[float, float],
    title: str,
    mark: float,
) -> None:
    """Quality and time against tau, as the paper plots them. exact: those of sequential decoding."""
    with Sheet(path, size=(6.6, 4.0), title=title) as sheet:
        (ax,) = sheet.axes.flat
        other = ax.twinx()
        other.grid(False)
        other.spines["right"].set_visible(True)
        lines = ax.plot(taus, quality[1], color=RED, marker="o", label=quality[0])
        lines += other.plot(taus, seconds, color=BLUE, marker="s", linestyle="--", label="seconds per batch")
        if exact[0] > 0:  # otherwise it lies on the axis
            lines += [
                ax.axhline(
                    exact[0], color=RED, linewidth=1, linestyle=":", label=f"{quality[0]} of sequential"
                )
            ]
        lines += [
            other.axhline(exact[1], color=BLUE, linewidth=1, linestyle=":", label="seconds of sequential"),
            ax.axvline(mark, color=GREY, linewidth=1, label=f"the paper's tau, {mark:g}"),
        ]
        ax.set_xscale("log")
        ax.set_xticks(list(taus), [f"{t:g}" for t in taus])
        ax.minorticks_off()
        ax.set_xlabel("stopping threshold tau")
        ax.set_ylabel(quality[0], color=RED)
        other.set_ylabel("seconds per batch", color=BLUE)
        ax.set_ylim(bottom=0 if min(*quality[1], exact[0]) >= 0 else None)
        other.set_ylim(bottom=0)
        sheet.figure.legend(handles=lines, loc="outside lower center", ncols=2)


def bars(
    path: Path, panels: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[float]]]], *, title: str
) -> None:
    """Panels of grouped bars (label, names of the groups, values of each kind), each with its value."""
    wide = [max(2.2, 1.5 * len(groups) + 1) for _, groups, _ in panels]
    shared: dict[str, Any] = {"gridspec_kw": {"width_ratios": wide}}
    size = (max(7.0, sum(wide)) / len(panels), 3.8)
    with Sheet(path, columns=len(panels), size=size, title=title, **shared) as sheet:
        for ax, (label, groups, named) in zip(sheet.axes.flat, panels, strict=True):
            width = 0.8 / len(named)
            for i, (name, values) in enumerate(named.items()):
                places = [g + (i - (len(named) - 1) / 2) * width for g in range(len(groups))]
                drawn = ax.bar(places, values, width * 0.92, label=name, color=COLOURS[i])
                ax.bar_label(drawn, [f"{v:.3g}" for v in values], fontsize=9)
            ax.set_xticks(range(len(groups)), groups)
            ax.set_ylabel(label)
            ax.grid(axis="x", visible=False)
        sheet.legend(sheet.axes.flat[0], columns=len(panels[0][2]))
