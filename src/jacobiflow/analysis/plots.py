"""Figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jacobiflow.analysis.compare import Convergence


def save_convergence(blocks: Sequence[Convergence], path: str | Path, *, title: str) -> None:
    """Error against steps in each block, sweeps beside sequential decoding, as one PNG."""
    from matplotlib.figure import Figure

    columns = min(len(blocks), 4)
    rows = -(-len(blocks) // columns)
    figure = Figure(figsize=(3.1 * columns, 2.8 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for i, ax in enumerate(axes.flat):
        if i >= len(blocks):
            ax.set_axis_off()
            continue
        block = blocks[i]
        ax.semilogy(_positive(block.sequential), color="0.6", label="one position a step")
        ax.semilogy(_positive(block.jacobi), color="C3", marker="o", markersize=3, label="sweeps")
        ax.set_title(f"block {i + 1}" + (" (next to the noise)" if i == 0 else ""), fontsize=10)
        ax.set_xlabel("steps")
        ax.grid(alpha=0.3)
        if i % columns == 0:
            ax.set_ylabel("distance from exact (l2)")
    axes.flat[0].legend(fontsize=8, loc="best")
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.savefig(path, dpi=120)


def _positive(values: Sequence[float]) -> list[float]:
    """For a logarithmic axis: exact is shown as nothing rather than as minus infinity."""
    return [v if v > 0 else float("nan") for v in values]
