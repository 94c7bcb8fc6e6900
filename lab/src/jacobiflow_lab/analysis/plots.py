"""Figures of the analyses. One style: the colours can be told apart by colour-blind eyes and in grey."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from jacobiflow.data.pictures import as_images, to_pixels
from jacobiflow_lab.analysis.convergence import Convergence
from jacobiflow_lab.analysis.memory import Memory
from jacobiflow_lab.analysis.progress import Progress
from jacobiflow_lab.analysis.redundancy import Redundancy, Variant
from jacobiflow_lab.analysis.runtime import Runtime
from jacobiflow_lab.analysis.sweeps import Sweeps

# Okabe and Ito's colours, dark ones first.
BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY = COLOURS = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#F0E442",
    "#8C8C8C",
)
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
DPI = 150


class Sheet:
    """A figure in the style of all others: `with Sheet(...) as s: s.axes[0, 0].plot(...)`, then a PNG."""

    def __init__(
        self,
        path: str | Path,
        *,
        rows: int = 1,
        columns: int = 1,
        size: tuple[float, float] = (6.0, 3.8),
        title: str = "",
        **shared: Any,
    ) -> None:
        from matplotlib import rc_context
        from matplotlib.figure import Figure

        self.path, self._style = path, rc_context(STYLE)
        with rc_context(STYLE):
            self.figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
            self.axes = self.figure.subplots(rows, columns, squeeze=False, **shared)
            if title:
                self.figure.suptitle(title, parse_math=False)  # titles hold names of files

    def __enter__(self) -> Sheet:
        self._style.__enter__()
        return self

    def legend(self, axes: Any, *, columns: int) -> None:
        """What the colours of `axes` mean, below the whole figure."""
        self.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=columns)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if error is None:
                self.figure.savefig(self.path, dpi=DPI)
        finally:
            self._style.__exit__(kind, error, trace)


def name_of(i: int) -> str:
    """Layers are counted from 1, as the paper does."""
    return f"layer {i + 1}"


def save_convergence(found: Convergence, path: str | Path, *, title: str) -> None:
    """Error against steps in each layer, sweeps beside sequential decoding."""
    count = len(found.blocks)
    columns = min(count, 2 if count <= 4 else 3 if count <= 6 else 4)
    rows = -(-count // columns)
    with Sheet(
        path, rows=rows, columns=columns, size=(3.8, 2.8), title=title, sharey=True, sharex=True
    ) as sheet:
        for i, ax in enumerate(sheet.axes.flat):
            if i >= count:
                ax.set_axis_off()
                continue
            block = found.blocks[i]
            ax.semilogy(_positive(block.sequential), color=GREY, label="sequential")
            if 0.0 in block.sequential:
                end = block.sequential.index(0.0)  # a logarithmic axis has no place for it
                ax.axvline(end, color=GREY, linewidth=1.2, linestyle=":", label="sequential: exact")
            ax.semilogy(
                _positive(block.jacobi), color=BLUE, marker="o", markersize=3.5, label="Jacobi sweeps"
            )
            ax.set_title(name_of(i) + (" (next to the noise)" if i == 0 else ""))
            if i >= count - columns:
                ax.set_xlabel("iterations")
                ax.tick_params(labelbottom=True)
            if i % columns == 0:
                ax.set_ylabel("distance to exact (L2)")
        sheet.legend(sheet.axes.flat[0], columns=3)


def save_ratios(found: Convergence, path: str | Path, *, title: str) -> None:
    """The ratio of successive errors in each layer: superlinear convergence is a falling line."""
    with Sheet(path, title=title) as sheet:
        (ax,) = sheet.axes.flat
        for i, block in enumerate(found.blocks):
            first = block.jacobi[0]
            shown = [r for r, e in zip(block.ratios, block.jacobi[1:], strict=True) if e > 1e-9 * first]
            ax.plot(
                range(1, len(shown) + 1),
                shown,
                color=COLOURS[i % 8],
                marker=MARKERS[i % 8],
                label=name_of(i),
            )
        ax.axhline(1, color="black", linewidth=1, linestyle=":")
        ax.set_xlabel("iteration t")
        ax.set_ylabel("error after t / error before")
        ax.set_ylim(bottom=0)
        ax.legend(ncols=2)


def save_redundancy(found: Redundancy, path: str | Path, *, title: str) -> None:
    """Cosine similarity and L2 distance of each layer, a column for each o, a row for each variant."""
    variants = list(dict.fromkeys(m.variant for m in found.masked))
    offsets = list(dict.fromkeys(m.o for m in found.masked))
    with Sheet(path, rows=len(variants), columns=len(offsets), size=(3.9, 3.1), title=title) as sheet:
        for m in found.masked:
            i, j = variants.index(m.variant), offsets.index(m.o)
            ax = sheet.axes[i, j]
            at = range(1, len(m.layers) + 1)
            (one,) = ax.plot(
                at, [d.cosine for d in m.layers], color=BLUE, marker="o", label="cosine similarity"
            )
            other = ax.twinx()
            other.spines["right"].set_visible(True)
            other.grid(False)
            (two,) = other.plot(
                at, [d.l2 for d in m.layers], color=RED, marker="s", linestyle="--", label="L2 distance"
            )
            ax.set_title(f"{m.variant}, o = {m.o}")
            ax.set_xticks(list(at))
            ax.set_ylim(min(0, *(d.cosine for d in m.layers)), 1.05)
            other.set_ylim(bottom=0)
            ax.tick_params(axis="y", colors=BLUE)
            other.tick_params(axis="y", colors=RED)
            if i == len(variants) - 1:
                ax.set_xlabel("layer")
            if j == 0:
                ax.set_ylabel("cosine similarity", color=BLUE)
            if j == len(offsets) - 1:
                other.set_ylabel("L2 distance", color=RED)
            if i == j == 0:
                ax.legend(handles=[one, two], loc="center right")


def save_masked(
    found: Redundancy, path: str | Path, *, variant: Variant, title: str, shown: int = 10
) -> bool:
    """The same samples with nothing masked and with each o; False if samples are no pictures."""
    rows = [("standard", found.exact), *((f"o = {m.o}", m.x) for m in found.masked if m.variant == variant)]
    return save_rows(rows, path, title=title, shown=shown)


def save_rows(
    rows: Sequence[tuple[str, Tensor]], path: str | Path, *, title: str = "", shown: int = 10
) -> bool:
    """Rows of pictures, each with its name; False if the tensors are no pictures."""
    import numpy as np

    strips = []
    for _, x in rows:
        images = as_images(x[:shown])
        if images is None:
            return False
        pixels = np.pad(to_pixels(images), ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=255)
        strips.append(np.concatenate(list(pixels), axis=1))
    height, width = strips[0].shape[:2]
    inches = 9.0
    size = (inches, inches * height / width + 0.12)
    with Sheet(path, rows=len(rows), size=size, title=title) as sheet:
        engine: Any = sheet.figure.get_layout_engine()
        engine.set(hspace=0, h_pad=0.02)
        for (name, _), strip, ax in zip(rows, strips, sheet.axes.flat, strict=True):
            ax.imshow(strip[..., 0] if strip.shape[2] == 1 else strip, cmap="gray", vmin=0, vmax=255)
            ax.set_xticks([])
            ax.set_yticks([])
            ax.grid(False)
            ax.spines[:].set_visible(False)
            ax.set_ylabel(name, rotation=0, ha="right", va="center")
    return True


def save_sweeps(found: Sequence[Sweeps], path: str | Path, *, title: str) -> None:
    """Sweeps of each layer: mean over samples, and the mean of the batches' slowest."""
    with Sheet(path, columns=len(found), size=(5.2, 3.8), title=title, sharey=True) as sheet:
        for one, ax in zip(found, sheet.axes.flat, strict=True):
            at = range(1, len(one.layers) + 1)
            mean, most = [s.mean for s in one.layers], [s.batch_max for s in one.layers]
            left = ax.bar([x - 0.2 for x in at], mean, 0.38, color=BLUE, label="mean over samples")
            right = ax.bar([x + 0.2 for x in at], most, 0.38, color=ORANGE, label="slowest of a batch")
            ax.bar_label(left, [_short(v) for v in mean], fontsize=9)
            ax.bar_label(right, [_short(v) for v in most], fontsize=9)
            ax.axhline(one.layers[0].bound, color="black", linewidth=1, linestyle=":", label="T - 1")
            ax.set_yscale("log")
            ax.set_ylim(0.8, 2 * one.layers[0].bound)
            ax.set_xticks(list(at))
            ax.set_xlabel("layer")
            ax.set_title(one.plan + ("" if one.tol is None else f", tau {one.tol:g}"), parse_math=False)
        _numbers(sheet.axes[0, 0].yaxis)
        sheet.axes[0, 0].set_ylabel("sweeps")
        sheet.legend(sheet.axes[0, 0], columns=3)


def save_runtime(found: Sequence[Runtime], path: str | Path, *, title: str) -> None:
    """Seconds of each plan, one bar, cut into layers and the rest."""
    with Sheet(path, size=(7.0, 1.6 + 0.62 * len(found)), title=title) as sheet:
        (ax,) = sheet.axes.flat
        starts = [0.0] * len(found)
        names = [f"{one.plan} ({one.total:.3g} s)" for one in found]
        parts = [
            (name_of(i), [r.layers[i].seconds for r in found], COLOURS[i % 7])
            for i in range(len(found[0].layers))
        ]
        for label, widths, colour in [*parts, ("other", [r.other for r in found], GREY)]:
            ax.barh(names, widths, left=starts, color=colour, label=label, edgecolor="white", height=0.65)
            starts = [a + b for a, b in zip(starts, widths, strict=True)]
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.set_xlabel(f"seconds a batch of {found[0].batch}")
        sheet.legend(ax, columns=5)


def save_memory(found: Memory, path: str | Path, *, title: str) -> None:
    """Peak memory of each plan."""
    with Sheet(path, size=(6.5, 1.4 + 0.55 * len(found.peaks)), title=title) as sheet:
        (ax,) = sheet.axes.flat
        names = [f"{p.plan}{', cache' if p.cache else ', no cache'}" for p in found.peaks]
        bars = ax.barh(
            range(len(names)),
            [p.peak / 2**20 for p in found.peaks],
            color=[BLUE if p.cache else ORANGE for p in found.peaks],
            height=0.65,
        )
        ax.bar_label(bars, [f"{p.peak / 2**20:.1f}" for p in found.peaks], padding=4)
        ax.set_yticks(range(len(names)), names)
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.12)
        ax.set_xlabel(f"peak of decoding {found.batch} samples, MiB\n({found.peaks[0].measure})")


def save_progress(found: Progress, path: str | Path, *, title: str) -> None:
    """Sweeps of each layer against the step of training."""
    steps = [m.step for m in found.moments]
    with Sheet(path, size=(6.6, 4.2), title=title) as sheet:
        (ax,) = sheet.axes.flat
        for i in range(len(found.moments[0].sweeps.layers)):
            ax.plot(
                steps,
                [m.sweeps.layers[i].mean for m in found.moments],
                color=COLOURS[i % 8],
                marker=MARKERS[i % 8],
                label=name_of(i),
            )
        bound = found.moments[0].sweeps.layers[0].bound
        ax.set_ylim(bottom=0)
        ax.set_xlabel("training step")
        ax.set_ylabel(f"sweeps of at most {bound}, mean")
        sheet.legend(ax, columns=5)


def _positive(values: Sequence[float]) -> list[float]:
    """For a logarithmic axis: exact is shown as nothing rather than as minus infinity."""
    return [v if v > 0 else float("nan") for v in values]


def _numbers(axis: Any) -> None:
    """Plain numbers on a logarithmic axis."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 20 or value == round(value) else f"{value:.1f}"
