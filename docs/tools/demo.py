"""The picture of README: `make demo`, then `python docs/tools/demo.py`, writes docs/images/demo.png.

It stands the grids that `make demo` left in out/ side by side, with sweeps and deviations of its report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

ROOT = Path(__file__).parents[2]
PLANS = ("sequential", "selective", "uniform")


def main(source: Path = ROOT / "out", folder: Path = ROOT / "docs" / "images") -> None:
    """The picture."""
    report = json.loads((source / "report.json").read_text(encoding="utf-8"))
    rows = {r["plan"]: r for r in report["rows"] if r["batch"] == report["n"]}
    figure = Figure(figsize=(11, 3.15), layout="constrained")
    for ax, plan in zip(figure.subplots(1, len(PLANS)), PLANS, strict=True):
        row = rows[plan]
        with Image.open(source / f"{plan}.png") as grid:
            ax.imshow(np.asarray(grid.convert("L")), cmap="gray")
        ax.set_axis_off()
        sweeps = " ".join(f"{mean:.0f}" for mean in row["sweeps"])
        far = "exact" if plan == "sequential" else f"largest deviation {row['largest']:.2g}"
        ax.set_title(f"{plan}: {far}\n{sweeps} sweeps in its blocks", fontsize=10)
    figure.savefig(folder / "demo.png", dpi=110)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
