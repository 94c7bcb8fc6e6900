"""Figures of the analyses, in one style. The colours are safe for colour-blind readers and in grey."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from jacobiflow.core.pictures import image_grid, save_strip
from jacobiflow_lab.analysis.convergence import Convergence
from jacobiflow_lab.analysis.memory import Memory
from jacobiflow_lab.analysis.redundancy import Redundancy, Variant
from jacobiflow_lab.analysis.sweeps import Progress, Sweeps

# The palette of Okabe and Ito.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C")
BLUE, ORANGE, _, _, _, RED, _, GREY = COLOURS
MARKERS = "osD^vP*X"
STYLE: Any = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "lines.linewidth": 2.0,
    "lines.markersize": 5,
    "figure.titlesize": 13,
}
DPI = 120
WIDTH_INCHES = 11.0  # of a row of grids


@contextmanager
def sheet(
    path: str | Path, rows: int = 1, columns: int = 1, size: Sequence[float] = (6, 3.8), title: str = "", **shared: Any
) -> Iterator[Any]:
    """The axes of a figure in the common style, written as a PNG: `with sheet(...) as axes: axes[0, 0].plot(...)`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False, **shared)
        if title:
            figure.suptitle(title, parse_math=False)  # titles contain file names
        yield axes
        figure.savefig(path, dpi=DPI)


def legend(ax: Any, columns: int, handles: Sequence[Any] | None = None) -> None:
    """A legend below the whole figure, of what was drawn in `ax` or of `handles`."""
    handles = ax.get_legend_handles_labels()[0] if handles is None else handles
    ax.figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def block_name(i: int) -> str:
    """Blocks are counted from 1 in sampling order, as the paper counts layers."""
    return f"block {i + 1}"


def save_convergence(convergence: Convergence, path: str | Path, *, title: str) -> None:
    """Error against iterations in each block: sweeps beside sequential decoding."""
    count = len(convergence.blocks)
    columns = min(count, 2 if count <= 4 else 3 if count <= 6 else 4)
    shared: dict[str, Any] = {"columns": columns, "size": (3.8, 2.8), "sharey": True, "sharex": True}
    with sheet(path, rows=-(-count // columns), title=title, **shared) as axes:
        for ax in axes.flat[count:]:
            ax.set_axis_off()
        for i, (ax, block) in enumerate(zip(axes.flat, convergence.blocks, strict=False)):
            # A logarithmic axis cannot show 0.
            ax.semilogy([error or math.nan for error in block.sequential], color=GREY, label="sequential")
            if 0.0 in block.sequential:
                end = block.sequential.index(0.0)
                ax.axvline(end, color=GREY, linewidth=1.2, linestyle=":", label="sequential: exact")
            shown = [error or math.nan for error in block.jacobi]
            ax.semilogy(shown, color=BLUE, marker="o", markersize=3.5, label="Jacobi sweeps")
            ax.set_title(block_name(i) + (" (next to the noise)" if i == 0 else ""))
            if i >= count - columns:
                ax.set_xlabel("iterations")
                ax.tick_params(labelbottom=True)
            if i % columns == 0:
                ax.set_ylabel("distance to exact (L2)")
        legend(axes[0, 0], 3)


def save_lines(
    path: str | Path,
    x: Sequence[float] | None,
    lines: Mapping[str, Sequence[float]],
    *,
    title: str,
    labels: tuple[str, str],
    log: bool = False,
    level: float | None = None,
) -> None:
    """Lines over x, or over 1, 2, ..., with the labels of the two axes. level: a dotted line."""
    with sheet(path, size=(6.6, 4.2), title=title) as axes:
        ax = axes[0, 0]
        for i, (name, y) in enumerate(lines.items()):
            at = range(1, len(y) + 1) if x is None else x
            ax.plot(at, y, color=COLOURS[i % 8], marker=MARKERS[i % 8], label=name)
        if level is not None:
            ax.axhline(level, color="black", linewidth=1, linestyle=":")
        ax.set(xlabel=labels[0], ylabel=labels[1])
        if log:
            ax.set(xscale="log", yscale="log")
        else:
            ax.set_ylim(bottom=0)
        legend(ax, 5 if len(lines) > 5 else 3)


def save_ratios(convergence: Convergence, path: str | Path, *, title: str) -> None:
    """The ratio of successive errors in each block: superlinear convergence is a falling line."""
    lines = {}
    for i, block in enumerate(convergence.blocks):
        floor = 1e-9 * block.jacobi[0]
        lines[block_name(i)] = [r for r, e in zip(block.ratios, block.jacobi[1:], strict=True) if e > floor]
    save_lines(path, None, lines, title=title, labels=("iteration t", "error after t / error before"), level=1)


def _twin(ax: Any, label: str) -> Any:
    """A second vertical axis in blue beside the first one in red."""
    other = ax.twinx()
    other.grid(False)
    other.spines["right"].set_visible(True)
    other.set_ylabel(label, color=BLUE)
    return other


def save_redundancy(redundancy: Redundancy, path: str | Path, *, title: str) -> None:
    """L2 distance and cosine similarity of each block, one column per o, one row per variant."""
    variants = list(dict.fromkeys(m.variant for m in redundancy.masked))
    offsets = list(dict.fromkeys(m.o for m in redundancy.masked))
    with sheet(path, rows=len(variants), columns=len(offsets), size=(3.9, 3.1), title=title) as axes:
        for m in redundancy.masked:
            ax, at = axes[variants.index(m.variant), offsets.index(m.o)], range(1, len(m.layers) + 1)
            cosine = [d.cosine for d in m.layers]
            lines = ax.plot(at, [d.l2 for d in m.layers], color=RED, marker="s", linestyle="--", label="L2 distance")
            other = _twin(ax, "cosine similarity")
            lines += other.plot(at, cosine, color=BLUE, marker="o", label="cosine similarity")
            other.set_ylim(min(0, *cosine), 1.05)
            ax.set(title=f"{m.variant}, o = {m.o}", xticks=at, xlabel="block")
            ax.set_ylabel("L2 distance", color=RED)
            ax.set_ylim(bottom=0)
        axes[0, 0].legend(handles=lines, loc="center right")


def save_masked(redundancy: Redundancy, path: str | Path, *, variant: Variant, title: str, shown: int = 10) -> None:
    """The same images with nothing masked and with each o."""
    rows = [(f"o = {m.o}", m.x) for m in redundancy.masked if m.variant == variant]
    save_strip([("standard", redundancy.exact), *rows], path, title=title, shown=shown)


def save_sweeps(plans: Sequence[Sweeps], path: str | Path, *, title: str) -> None:
    """Sweeps of each block: the mean over samples, and of the slowest sample per batch."""
    panels = []
    for plan in plans:
        label = plan.plan + ("" if plan.tol is None else f", tau {plan.tol:g}")
        values = {"mean over samples": [s.mean for s in plan.layers]}
        values |= {"slowest of a batch": [s.batch_max for s in plan.layers]}
        panels.append((f"sweeps, {label}", [str(i + 1) for i in range(len(plan.layers))], values))
    save_bars(path, panels, title=title, log=True, level=plans[0].layers[0].bound)


def save_runtime(plans: Sequence[dict[str, Any]], path: str | Path, *, title: str) -> None:
    """Seconds of each plan, rows of `runtimes`: one bar, divided into blocks and the rest."""
    with sheet(path, size=(7.0, 1.6 + 0.62 * len(plans)), title=title) as axes:
        ax = axes[0, 0]
        names = [f"{plan['plan']} ({plan['whole']:.3g} s)" for plan in plans]
        blocks = list(zip(*([layer["seconds"] for layer in plan["layers"]] for plan in plans), strict=True))
        parts = [(block_name(i), widths, COLOURS[i % 7]) for i, widths in enumerate(blocks)]
        starts = [0.0] * len(plans)
        for label, widths, colour in [*parts, ("other", [plan["other"] for plan in plans], GREY)]:
            ax.barh(names, widths, left=starts, color=colour, label=label, edgecolor="white", height=0.65)
            starts = [a + b for a, b in zip(starts, widths, strict=True)]
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlabel(f"seconds per batch of {plans[0]['batch']}")
        legend(ax, 5)


def save_memory(memory: Memory, path: str | Path, *, title: str) -> None:
    """Peak memory of each plan."""
    names = [f"{p.plan}\ncache: {p.cache}" for p in memory.peaks]
    label = f"MiB, peak of decoding {memory.batch} samples\n({memory.peaks[0].measure})"
    save_bars(path, [(label, names, {"peak": [p.peak / 2**20 for p in memory.peaks]})], title=title)


def save_progress(progress: Progress, path: str | Path, *, title: str) -> None:
    """Sweeps of each block against the training step."""
    steps, first = [m.step for m in progress.moments], progress.moments[0].sweeps.layers
    lines = {block_name(i): [m.sweeps.layers[i].mean for m in progress.moments] for i in range(len(first))}
    labels = ("training step", f"sweeps of at most {first[0].bound}, mean")
    save_lines(path, steps, lines, title=title, labels=labels)


def save_bars(
    path: str | Path,
    panels: Sequence[tuple[str, Sequence[str], Mapping[str, Sequence[float]]]],
    *,
    title: str,
    log: bool = False,
    level: float | None = None,
) -> None:
    """Panels of grouped bars (label, names of the groups, values of each kind), each with its value.

    level: a dotted line.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    wide = [max(2.2, 0.5 * len(groups) * (len(named) + 1) + 1) for _, groups, named in panels]
    shared: dict[str, Any] = {"gridspec_kw": {"width_ratios": wide}}
    size = (max(7.0, sum(wide)) / len(panels), 3.8)
    with sheet(path, columns=len(panels), size=size, title=title, **shared) as axes:
        for ax, (label, groups, named) in zip(axes.flat, panels, strict=True):
            width = 0.8 / len(named)
            for i, (name, values) in enumerate(named.items()):
                places = [g + (i - (len(named) - 1) / 2) * width for g in range(len(groups))]
                drawn = ax.bar(places, values, width * 0.92, label=name, color=COLOURS[i])
                ax.bar_label(drawn, [f"{v:.3g}" for v in values], fontsize=9)
            if level is not None:
                ax.axhline(level, color="black", linewidth=1, linestyle=":")
            ax.set_xticks(range(len(groups)), groups, fontsize=9)
            ax.set_ylabel(label)
            if log:
                ax.set(yscale="log", ylim=(0.8, None))
                ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                ax.yaxis.set_major_formatter("{x:g}")
                ax.yaxis.set_minor_formatter(NullFormatter())
            ax.grid(axis="x", visible=False)
        if len(panels[0][2]) > 1:
            legend(axes[0, 0], len(panels[0][2]))


def save_against_tau(
    path: str | Path,
    taus: Sequence[float],
    panels: Mapping[str, Sequence[float]],
    seconds: Sequence[float],
    *,
    title: str,
    mark: float,
) -> None:
    """Measures of quality (one panel each) and time against tau, as the paper plots them.

    The first value of each is that of sequential decoding. seconds: empty if there are none.
    """
    with sheet(path, columns=len(panels), size=(4.4, 3.6), title=title) as axes:
        for ax, (label, (exact, *values)) in zip(axes.flat, panels.items(), strict=True):
            lines = ax.plot(taus, values, color=RED, marker="o", label="quality")
            if exact > 0:  # otherwise it lies on the axis
                lines += [ax.axhline(exact, color=RED, linewidth=1, linestyle=":", label="quality, sequential")]
            if seconds:
                other = _twin(ax, "seconds per batch")
                lines += other.plot(taus, seconds[1:], color=BLUE, marker="s", linestyle="--", label="time")
                lines += [other.axhline(seconds[0], color=BLUE, linewidth=1, linestyle=":", label="time, sequential")]
                other.set_ylim(bottom=0)
            lines += [ax.axvline(mark, color=GREY, linewidth=1, label=f"the paper's tau, {mark:g}")]
            ax.set_xscale("log")
            ax.set_xticks(list(taus), [f"{t:g}" for t in taus], fontsize=8)
            ax.minorticks_off()
            ax.set_xlabel("stopping threshold tau")
            ax.set_ylabel(f"{label} (lower is better)", color=RED)
            ax.set_ylim(bottom=0 if min(*values, exact) >= 0 else None)
        legend(axes[0, 0], 5, lines)


def save_grids(path: str | Path, panels: Mapping[str, Tensor], *, columns: int, across: int, title: str = "") -> None:
    """Grids of uint8 pictures beside each other, each under its name."""
    across = min(across, len(panels))
    pages = {
        name: np.asarray(image_grid(pixels / 127.5 - 1, columns=columns).convert("RGB"))
        for name, pixels in panels.items()
    }
    height, width, _ = next(iter(pages.values())).shape
    size = (WIDTH_INCHES / across, WIDTH_INCHES / across * height / width + 0.4)
    with sheet(path, rows=-(-len(pages) // across), columns=across, size=size, title=title) as axes:
        for ax in axes.flat:
            ax.set_axis_off()
        for ax, (name, picture) in zip(axes.flat, pages.items(), strict=False):
            ax.imshow(picture, interpolation="nearest")
            ax.set_title(name)
