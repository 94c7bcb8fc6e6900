"""Figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jacobiflow.analysis.compare import Convergence, Row


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


def save_times(rows: Sequence[Row], path: str | Path, *, title: str) -> None:
    """Milliseconds a sample of each plan at each batch size, with the speed-up over it, as one PNG."""
    from matplotlib.figure import Figure

    plans, batches = (list(dict.fromkeys(getattr(r, name) for r in rows)) for name in ("plan", "batch"))
    figure = Figure(figsize=(max(5.0, 1.1 * len(rows) + 1), 3.6), layout="constrained")
    ax = figure.subplots()
    wide = 0.8 / len(plans)
    for i, plan in enumerate(plans):
        mine = [r for r in rows if r.plan == plan]
        bars = ax.bar(
            [batches.index(r.batch) + (i - (len(plans) - 1) / 2) * wide for r in mine],
            [1000 * r.seconds / r.batch for r in mine],
            width=0.92 * wide,
            color="0.6" if plan == "sequential" else f"C{i - 1}",
            label=Path(plan).name,
        )
        ax.bar_label(bars, labels=[f"{r.speedup:.2g}x" for r in mine], fontsize=8, padding=1)
    ax.set_xticks(range(len(batches)), [f"batch {b}" for b in batches])
    ax.set_ylabel("milliseconds a sample")
    ax.margins(y=0.15)
    ax.legend(fontsize=8)
    ax.set_title(title, fontsize=9, wrap=True, parse_math=False)
    figure.savefig(path, dpi=120)


def _positive(values: Sequence[float]) -> list[float]:
    """For a logarithmic axis: exact is shown as nothing rather than as minus infinity."""
    return [v if v > 0 else float("nan") for v in values]
