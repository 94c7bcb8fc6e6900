"""Results as what the page shows: pictures with captions, tables, a figure and sentences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image
from torch import Tensor

from jacobiflow.core.method import Method
from jacobiflow.data.pictures import as_images, image_grid
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
Table = list[list[str]]


def seconds(value: float) -> str:
    """A duration with three significant digits.

    >>> seconds(0.01234), seconds(12.34)
    ('12.3 ms', '12.3 s')
    """
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def deviation(value: float | None) -> str:
    """A deviation with two significant digits; None is one that is not finite."""
    return "not finite" if value is None or not math.isfinite(value) else f"{value:.2g}"


def method_name(method: Method) -> str:
    """A method in a few words."""
    if method.width == 1:
        return "sequential"
    width = "whole sequence" if method.width is None else f"windows of {method.width}"
    return f"{width}, tolerance {method.tol:g}"


def block_name(i: int, count: int) -> str:
    """Block i of `count`, counted from 1 in sampling order.

    >>> block_name(1, 4), block_name(3, 4)
    ('1 (next to the noise)', '3')
    """
    return f"{i} (next to the noise)" if i == 1 else f"{i} (next to the data)" if i == count else str(i)


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


def sample_title(result: SampleResult) -> str:
    """What the results are of, as one sentence in Markdown."""
    samples = "1 sample" if len(result.exact) == 1 else f"{len(result.exact)} samples"
    return f"### {result.model}: {samples} from seed {result.seed}, sequential and {result.rows[1].plan}"


def sample_table(result: SampleResult) -> Table:
    """Time and deviation of sequential decoding and of the plan."""
    rows = result.rows[:1] if result.rows[0] == result.rows[1] else result.rows
    return [
        [r.plan, seconds(r.seconds), f"{r.speedup:.2f}x", deviation(r.largest), deviation(r.mean), r.summary]
        for r in rows
    ]


def block_table(result: SampleResult) -> Table:
    """Method, sweeps and time per block of the plan."""
    positions, count = result.convergence.blocks[0].length - 1, len(result.plan)
    per_block = zip(result.plan, result.rows[1].sweeps, result.decoded.stats.blocks, strict=True)
    return [
        [block_name(i, count), method_name(method), f"{sweeps:.1f} of {positions}", seconds(stats.seconds)]
        for i, (method, sweeps, stats) in enumerate(per_block, 1)
    ]


def sample_pictures(flow: Flow, result: SampleResult) -> list[Picture]:
    """Sequential samples, those of the plan, and their difference."""
    base, row = result.rows
    columns, white = grid_columns(len(result.exact), result.labels), white_level(flow, result.exact)
    difference, top = deviation_grid(result.decoded.x, result.exact, columns=columns)
    scale = f"black is 0, the brightest is {deviation(top)}" if top else "every pixel is the same"
    return [
        (grid(result.exact, columns=columns, white=white), f"sequential: exact, in {seconds(base.seconds)}"),
        (grid(result.decoded.x, columns=columns, white=white), f"{row.plan}: in {seconds(row.seconds)}"),
        (difference, f"difference: {scale}"),
    ]


def step_pictures(
    flow: Flow,
    result: SampleResult,
    steps: Walk,
    after: tuple[Tensor, Tensor],
    sweeps: float,
    positions: float,
) -> list[Picture]:
    """Samples after some sweeps, and after some single positions."""
    white = white_level(flow, result.exact)
    swept, sequential = (grid(x, columns=STEPPED_COLUMNS, white=white) for x in after)
    return [
        (swept, f"all positions at once: after {sweeps:g} of {len(steps.swept) - 1} sweeps"),
        (sequential, f"one position at a time: after {positions:g} of {steps.length - 1} steps"),
    ]


def convergence_picture(result: SampleResult) -> Picture:
    """Distance from the exact answer against steps, per block."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "convergence.png"
        save_convergence(result.convergence, path, title="")
        return Image.open(path).convert("RGB"), "How each block approaches its exact answer"


# Invert


def inversion_table(result: InversionResult) -> Table:
    """The figures of an inversion, by name."""
    stats = result.decoded.stats
    residual = 0.0 if stats.residual is None else float(stats.residual.max())
    return [
        ["model", result.model],
        ["largest error", deviation(float(result.error.max()))],
        ["mean error", deviation(float(result.error.mean()))],
        ["log-likelihood", f"{result.log_prob:,.1f} nats"],
        ["bits per dimension", f"{result.bits_per_dim:.3f}"],
        ["error of the noise", deviation(residual)],
        ["decoding time", seconds(stats.seconds)],
        ["status", stats.status.name.lower().replace("_", " ")],
    ]


def inversion_pictures(result: InversionResult) -> list[Picture]:
    """The image, its noise, the reconstruction, and their difference."""
    difference, top = deviation_grid(result.decoded.x, result.x)
    return [
        (grid(result.x), "dark and light exchanged" if result.inverted else "with training noise"),
        (grid(result.z, white=3.0), "noise, from -3 to 3"),
        (grid(result.decoded.x), "decoded again"),
        (difference, f"difference: up to {deviation(top)}"),
    ]


def label_scores(result: InversionResult) -> dict[str, float]:
    """Probability per label by Bayes' rule with equal priors, named with its log-likelihood."""
    probabilities = torch.tensor(result.by_label, dtype=torch.float64).softmax(0).tolist()
    scores = zip(result.by_label, probabilities, strict=True)
    return {f"{i}: {log_prob:,.1f} nats": p for i, (log_prob, p) in enumerate(scores)}


# Plans


def plan_text(result: PlanResult) -> str:
    """What the plan is for and how fast it is, in Markdown."""
    guidance = f", guidance {result.guidance.weight:g}" if result.guidance.weight else ""
    what = f"### {result.model}, batches of {result.batch}{guidance}\n\n"
    if not result.plan.about:
        return f"{what}Plan auto uses this plan. Press Tune to time it against others."
    measured, setting = result.plan.about["measured"], result.plan.about["setting"]
    return (
        f"{what}The fastest of {len(result.plan.about['tried'])} plans. The largest deviation from exact is "
        f"{deviation(measured['deviation'])}; {setting['max_deviation']:g} is allowed. Measured on "
        f"{measured['rows']} samples.\n\n"
        f"{setting['machine']}, {setting['device']}, threads: {setting['threads']}"
    )


def plan_table(result: PlanResult) -> Table:
    """The method of each block; then time and deviation of the whole plan, if it was timed."""
    table = []
    for i, method in enumerate(result.plan, 1):
        init = "" if method.width == 1 else str(method.init)
        table.append([block_name(i, len(result.plan)), method_name(method), init, "", "", "", ""])
    if not result.plan.about:
        return table
    measured = result.plan.about["measured"]
    base = measured["sequential_seconds"]
    times = [seconds(measured["seconds"]), seconds(base), f"{measured['speedup']:.2f}x"]
    return [*table, ["all", "", "", *times, deviation(measured["deviation"])]]
