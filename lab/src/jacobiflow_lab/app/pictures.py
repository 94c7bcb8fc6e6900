"""Samples as pictures: grids, maps of deviations and curves, as HTML that needs nothing from elsewhere."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from jacobiflow.data.pictures import as_images, to_pixels
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.convergence import Approach

GAP = 2  # pixels between the pictures of a grid
GROUND = (127, 127, 135)  # of a grid, neither light nor dark
NOT_FINITE = (0, 200, 255)  # in maps of deviations
INK = "#123456"  # stands for the page's own text colour in a drawing, until it is on the page
ACCENT, QUIET = "#ea580c", "#8a8a94"

Pixels = npt.NDArray[np.uint8]


def span(flow: Flow, x: Tensor) -> float:
    """The number that is shown as white: 1 for pictures, the largest one for fields of a target."""
    finite = x[x.isfinite()]
    return 1.0 if flow.target is None or not len(finite) else max(float(finite.abs().max()), 1e-9)


def grid(x: Tensor, *, columns: int | None = None, white: float = 1.0) -> Pixels:
    """Samples as one picture [H, W, 3], row by row."""
    images = as_images(x)
    assert images is not None, "the shelf holds pictures only"
    pixels = to_pixels(images / white)
    return _sheet(pixels if pixels.shape[3] == 3 else pixels.repeat(3, axis=3), columns)


def deviation_grid(x: Tensor, exact: Tensor, *, columns: int | None = None) -> tuple[Pixels, float]:
    """|x - exact| of every pixel, the largest over its channels, from black to the brightest colour, and
    what the brightest colour stands for. Where one of the two is not finite the map is blue."""
    from matplotlib import colormaps

    off = as_images((x - exact).abs())
    assert off is not None, "the shelf holds pictures only"
    off = off.detach().cpu().double().amax(1)
    known = off[off.isfinite()]
    top = float(known.max()) if len(known) else 0.0
    shade = (off / top if top > 0 else torch.zeros_like(off)).nan_to_num(0.0, 0.0, 0.0).numpy()
    colours = (np.asarray(colormaps["inferno"](shade))[..., :3] * 255).round().astype(np.uint8)
    colours[~off.isfinite().numpy()] = NOT_FINITE
    return _sheet(colours, columns), top


def across(n: int, labels: Sequence[int] = ()) -> int:
    """Columns of a grid: one for each label if all come twice or more, else about as many as rows.

    >>> across(10, range(10)), across(64, range(10)), across(64), across(7)
    (5, 10, 8, 3)
    """
    if 3 <= len(labels) <= min(n // 2, 12):
        return len(labels)
    root = math.ceil(math.sqrt(n))
    full = (c for c in range(root, n + 1) if n % c == 0 and c <= 1.6 * math.sqrt(n))  # no gap in the last row
    return next(full, root)


def _sheet(pixels: Pixels, columns: int | None) -> Pixels:
    n, h, w, _ = pixels.shape
    gap = GAP if n > 1 else 0
    columns = columns or across(n)
    rows = -(-n // columns)
    sheet = np.empty((rows * (h + gap) + gap, columns * (w + gap) + gap, 3), dtype=np.uint8)
    sheet[:] = GROUND
    for i, image in enumerate(pixels):
        top, left = gap + (i // columns) * (h + gap), gap + (i % columns) * (w + gap)
        sheet[top : top + h, left : left + w] = image
    return sheet


def png(pixels: Pixels) -> str:
    """A picture as an address that holds all of it."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def curve(block: Approach, title: str) -> str:
    """Error against steps in one block, sweeps beside sequential decoding, as SVG in the page's colours."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9}):
        figure = Figure(figsize=(2.7, 2.1), layout="constrained")
        ax = figure.subplots()
        ax.semilogy(*_steps(block.sequential), color=QUIET, linewidth=1.6)
        ax.semilogy(*_steps(block.jacobi), color=ACCENT, marker="o", markersize=3, linewidth=1.6)
        ax.set_xscale("symlog", linthresh=10, linscale=1)
        full = len(block.sequential)
        ax.set_xlim(0, max(full - 1, 1))
        ticks = [t for t in ((0, 2, 5, 10, 20, 40) if full < 100 else (0, 5, 10, 50, 200, 1000)) if t < full]
        ax.set_xticks(ticks, [str(t) for t in ticks])
        ax.minorticks_off()
        ax.set_title(title, fontsize=10, color=INK)
        ax.set_xlabel("steps", color=INK)
        ax.tick_params(colors=INK)
        ax.grid(color=QUIET, alpha=0.25, linewidth=0.6)
        for side in ax.spines.values():
            side.set_color(QUIET)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def _steps(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """For a logarithmic axis: exact is shown as nothing rather than as minus infinity."""
    pairs = [(i, v) for i, v in enumerate(values) if v > 0]
    return [i for i, _ in pairs], [v for _, v in pairs]
