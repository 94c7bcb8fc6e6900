"""The picture of README: `make demo`, then `python docs/tools/demo.py`, writes docs/images/demo.png.

It draws the samples of bench.json in out/ again, with their sweeps and deviations.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import jacobiflow as jf
from jacobiflow.core.pictures import save_strip

ROOT = Path(__file__).parents[2]
SHOWN = 20  # images per row
PLANS = ("sequential", "selective", "uniform")


def main(source: Path = ROOT / "out", folder: Path = ROOT / "docs" / "images") -> None:
    """Write the picture."""
    report = json.loads((source / "bench.json").read_text(encoding="utf-8"))
    rows = {row["plan"]: row for row in report["rows"]}  # of the largest batch, which is the last
    flow, labels = jf.load(report["model"]), torch.arange(SHOWN) % 10
    strips = []
    for plan in PLANS:
        x = flow.sample(SHOWN, labels=labels, seed=report["seed"], plan=plan).x
        deviation = "exact" if plan == "sequential" else f"largest deviation {rows[plan]['largest']:.2g}"
        sweeps = ", ".join(f"{mean:.0f}" for mean in rows[plan]["sweeps"])
        strips.append((f"{plan}: {deviation}; sweeps per block {sweeps}", x))
    save_strip(strips, folder / "demo.png", shown=SHOWN)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
