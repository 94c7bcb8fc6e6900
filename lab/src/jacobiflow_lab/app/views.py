"""Results as what the page shows: pictures with captions, numbers as texts. results.html arranges them."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, PackageLoader
from PIL import Image
from torch import Tensor

from jacobiflow.core.pictures import as_images, image_grid
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.plots import save_convergence
from jacobiflow_lab.analysis.trajectory import Walk
from jacobiflow_lab.app.actions import PlanResult, SampleResult
from jacobiflow_lab.app.invert import InversionResult
from jacobiflow_lab.lattice.lattice_flow import LatticeFlow

GAP_PIXELS = 2  # between the samples of a grid
NONFINITE_COLOUR = (0, 200, 255)  # in maps of deviations
STEPPED_COLUMNS = 5

Picture = tuple[Image.Image, str]  # with its caption
Pictures = dict[str, Picture]  # by their ids


def seconds(value: float) -> str:
    """A duration with three significant digits.

    >>> seconds(0.01234), seconds(12.34)
    ('12.3 ms', '12.3 s')
    """
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def deviation(value: float | None) -> str:
    """A deviation with two significant digits; None is one that is not finite."""
    return "not finite" if value is None or not math.isfinite(value) else f"{float(value):.2g}"


def compared(ratio: float, other: str) -> str:
    """A speed-up in words.

    >>> compared(3.14, "the plain loop"), compared(0.5, "before"), compared(0.98, "before")
    ('is 3.1x faster than the plain loop', 'is 2x slower than before', 'takes as long as before')
    """
    faster, slower = f"{ratio:.2g}", f"{1 / ratio:.2g}"
    if "1" in (faster, slower):
        return f"takes as long as {other}"
    return f"is {faster}x faster than {other}" if ratio > 1 else f"is {slower}x slower than {other}"


def block_name(i: int, count: int) -> str:
    """Block i of `count`, counted from 1 in sampling order.

    >>> block_name(1, 4), block_name(3, 4)
    ('1 (next to the noise)', '3')
    """
    return f"{i} (next to the noise)" if i == 1 else f"{i} (next to the data)" if i == count else str(i)


def data_url(content: bytes, kind: str = "application/octet-stream") -> str:
    """Content as an address. Files have no other: the gate lets none out."""
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def png_url(image: Image.Image) -> str:
    """A picture as an address."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return data_url(file.getvalue(), "image/png")


TEMPLATES = Environment(loader=PackageLoader("jacobiflow_lab", "app"), autoescape=True)
TEMPLATES.filters |= {"png": png_url, "base64": data_url}
TEMPLATES.filters |= {"seconds": seconds, "deviation": deviation, "compared": compared}
TEMPLATES.globals["block_name"] = block_name
RESULTS: Any = TEMPLATES.get_template("results.html").module

# Pictures


def white_level(flow: Flow, x: Tensor) -> float:
    """The value that is shown as white: 1 for images, the largest value for lattice fields."""
    finite = x[x.isfinite()]
    is_field = isinstance(flow, LatticeFlow) and len(finite)
    return max(float(finite.abs().max()), 1e-9) if is_field else 1.0


def grid(x: Tensor, *, columns: int | None = None, white: float = 1.0) -> Image.Image:
    """Samples as one picture, row by row. -white is shown as black."""
    images, n = as_images(x), len(x)
    assert images is not None, "the registry holds models of images only"
    return image_grid(images / white, columns=columns or grid_columns(n), gap=GAP_PIXELS if n > 1 else 0)


def deviation_grid(x: Tensor, exact: Tensor, *, columns: int | None = None) -> tuple[Image.Image, float]:
    """|x - exact| per pixel, the largest over channels, as a heat map, and the value of its brightest colour.

    Pixels that are not finite are blue.
    """
    from matplotlib import colormaps

    images = as_images((x - exact).abs())
    assert images is not None, "the registry holds models of images only"
    off = images.detach().cpu().double().amax(1)
    known = off.isfinite()
    top = float(off[known].max()) if known.any() else 0.0
    colours = torch.tensor(colormaps["inferno"]((off.where(known, 0.0) / (top or 1.0)).numpy()))[..., :3]
    colours[~known] = torch.tensor(NONFINITE_COLOUR, dtype=colours.dtype) / 255
    return grid(colours.permute(0, 3, 1, 2) * 2 - 1, columns=columns), top


def grid_columns(n: int, labels: Sequence[int] = ()) -> int:
    """Columns of a grid: one per label if every label comes twice or more, else about as many as rows.

    >>> grid_columns(10, range(10)), grid_columns(64, range(10)), grid_columns(64), grid_columns(7)
    (5, 10, 8, 3)
    """
    if 3 <= len(labels) <= min(n // 2, 12):
        return len(labels)
    root = math.ceil(math.sqrt(n))
    full = (c for c in range(root, n + 1) if n % c == 0 and c <= 1.6 * math.sqrt(n))  # no gap in the last row
    return next(full, root)


# Sample


def sample_file(result: SampleResult) -> bytes:
    """The samples as arrays: by the plan, exact, and the labels in turn."""
    file = io.BytesIO()
    arrays = {"x": result.decoded.x, "exact": result.exact, "labels": torch.tensor(result.labels)}
    numbers: dict[str, Any] = {name: t.detach().cpu().numpy() for name, t in arrays.items()}
    np.savez_compressed(file, **numbers)
    return file.getvalue()


def sample_html(flow: Flow, result: SampleResult) -> str:
    """The samples, above the panel of steps."""
    return str(RESULTS.sample(result, sample_pictures(flow, result), sample_file(result)))


def block_html(result: SampleResult) -> str:
    """Sweeps and convergence per block, below that panel."""
    return str(RESULTS.blocks(result, convergence_picture(result)))


def sample_pictures(flow: Flow, result: SampleResult) -> Pictures:
    """Sequential samples, those of the plan, and their difference."""
    base, row = result.rows
    columns, white = grid_columns(len(result.exact), result.labels), white_level(flow, result.exact)
    exact, decoded = (grid(x, columns=columns, white=white) for x in (result.exact, result.decoded.x))
    difference, top = deviation_grid(result.decoded.x, result.exact, columns=columns)
    scale = f"black is 0, the brightest is {deviation(top)}" if top else "every pixel is the same"
    return {
        "sequential": (exact, f"sequential: exact, in {seconds(base.seconds)}"),
        "planned": (decoded, f"{row.plan}: in {seconds(row.seconds)}"),
        "difference": (difference, f"difference: {scale}"),
    }


def step_html(
    flow: Flow, result: SampleResult, steps: Walk, after: Sequence[Tensor], sweeps: float, positions: float
) -> str:
    """Samples after some sweeps, and after some single positions."""
    white = white_level(flow, result.exact)
    swept, sequential = (grid(x, columns=min(STEPPED_COLUMNS, len(x)), white=white) for x in after)
    swept_caption = f"all positions at once: after {sweeps:g} of {len(steps.swept) - 1} sweeps"
    caption = f"one position at a time: after {positions:g} of {steps.length - 1} steps"
    pictures = {"after-sweeps": (swept, swept_caption), "after-positions": (sequential, caption)}
    return str(RESULTS.pictures(pictures))


def convergence_picture(result: SampleResult) -> Picture:
    """Distance from the exact answer against steps, per block."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "convergence.png"
        save_convergence(result.convergence, path, title="")
        return Image.open(path).convert("RGB"), "How each block approaches its exact answer"


# Invert


def inversion_pictures(result: InversionResult) -> Pictures:
    """The image, its noise, the reconstruction, and their difference."""
    difference, top = deviation_grid(result.decoded.x, result.x)
    return {
        "image": (grid(result.x), f"the image{', dark and light exchanged' * result.inverted}, with training noise"),
        "noise": (grid(result.z, white=3.0), "noise, from -3 to 3"),
        "reconstruction": (grid(result.decoded.x), "decoded again"),
        "error": (difference, f"difference: up to {deviation(top)}"),
    }


def label_scores(result: InversionResult, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Log-likelihood and probability per label, by Bayes' rule with equal priors."""
    probabilities = torch.tensor(result.by_label, dtype=torch.float64).softmax(0).tolist()
    return dict(zip(names, zip(result.by_label, probabilities, strict=True), strict=False))


def inversion_html(result: InversionResult, names: Sequence[str]) -> str:
    """All about an inversion. names: those of the labels."""
    return str(RESULTS.inversion(result, inversion_pictures(result), label_scores(result, names)))


def plan_html(result: PlanResult) -> str:
    """All about a plan."""
    return str(RESULTS.plan(result))
