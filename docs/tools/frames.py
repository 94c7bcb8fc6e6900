"""Frames of a real solve: `python docs/tools/frames.py` writes docs/images/frames-*.png.

They show one digit of the bundled model `mnist-small`, in the block next to the data and in the block next to the
noise. Each strip compares whole-sequence sweeps from zeros with sequential decoding after the same number of
passes through the conditioner. All blocks before it are exact.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

import jacobiflow as jf

IMAGES = Path(__file__).parents[1] / "images"


def main(folder: Path = IMAGES) -> None:
    """Write both strips."""
    flow = jf.load("mnist-small")
    for name, swept in (("noise", 0), ("data", len(flow.blocks) - 1)):
        methods = [jf.Method(width=1, init="zeros")] * len(flow.blocks)
        exact = solve(flow, methods, swept)
        methods[swept] = jf.Method(width=None, tol=0, init="zeros")
        sweeps = solve(flow, methods, swept)
        draw(flow, sweeps, exact, folder / f"frames-{name}.png", f"block next to the {name}")


def solve(flow: jf.Flow, methods: list[jf.Method], block: int) -> list[Tensor]:
    """What that block holds after 0, 1, 2, ... steps, in the order of the data."""
    seen: list[Tensor] = []

    def watch(sweep: jf.Sweep) -> None:
        if sweep.block == block:
            seen.append(sweep.x.clone())

    flow.decode(flow.noise(1, seed=4), jf.Plan(tuple(methods)), labels=3, watch=watch)
    return seen


def draw(flow: jf.Flow, sweeps: list[Tensor], steps: list[Tensor], path: Path, title: str) -> None:
    """Three rows: the guess after so many sweeps, how far it is from exact, and sequential decoding."""
    exact, last = steps[-1], len(steps) - 1
    passes = [0, *(2**i for i in range(12) if 2**i < last), last]
    figure = Figure(figsize=(8.6, 25.8 / len(passes) + 1), layout="constrained")  # inches of the guide's column
    axes = figure.subplots(3, len(passes))
    bound = 3 if "noise" in title else 1
    grey: dict[str, Any] = {"cmap": "gray", "vmin": -bound, "vmax": bound}

    def picture(x: Tensor) -> Tensor:
        return flow.from_sequence(x)[0, 0]

    for column, step in zip(axes.T, passes, strict=True):
        for ax in column:
            ax.set_xticks([])
            ax.set_yticks([])
        column[0].set_title(f"{step}", fontsize=12)
        known = (steps[step] == exact).all(-1, keepdim=True)
        column[2].set_facecolor("#c8d6e8")
        column[2].imshow(picture(torch.where(known, exact, float("nan"))), **grey)
        if step >= len(sweeps):  # they have ended
            for ax in column[:2]:
                ax.imshow(torch.full((28, 28), float("nan")))
                ax.spines[:].set_visible(False)
            continue
        off = (sweeps[step] - exact).abs()
        column[0].imshow(picture(sweeps[step]), **grey)
        heat = column[1].imshow(picture(off.clamp(min=1e-6)).log10(), cmap="magma", vmin=-5, vmax=0)
        column[1].set_xlabel(f"{off.max():.1g}", fontsize=11)
    for ax, text in zip(axes[:, 0], ("sweeps", "deviation\nfrom exact", "sequential\ndecoding"), strict=True):
        ax.set_ylabel(text, fontsize=11)
    bar = figure.colorbar(heat, ax=axes[1, :], shrink=0.9, pad=0.01, ticks=[-4, -2, 0])
    bar.ax.set_yticklabels(["0.0001", "0.01", "1"], fontsize=10)
    end = f"sweeps end after {len(sweeps) - 1}"
    figure.suptitle(f"{title}: by number of passes through the conditioner ({end})", fontsize=12)
    figure.savefig(path, dpi=180)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
