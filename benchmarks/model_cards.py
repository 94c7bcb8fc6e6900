"""What the cards of bundled models show: `python -m benchmarks.model_cards [NAME ...]`.

Draws samples.png and, from the table of the training log, training.png; counts the sweeps of 64 samples again
and prints them. Cards refer to the pictures; `benchmarks.bundle` writes the cards.
"""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import torch

import jacobiflow as jf
from jacobiflow.core.pictures import save_images
from jacobiflow.flows.checkpoint import bundled_names
from jacobiflow.flows.compare import compare
from jacobiflow_lab.analysis.plots import BLUE, ORANGE, sheet

MODELS = Path("models/src/jacobiflow_models")
SHOWN, COLUMNS, SWEPT = 40, 10, 64  # samples in the picture, its columns, samples whose sweeps are counted
EPOCH = re.compile(r"^\| (\d+) \| \d+ \| (-?[\d.]+) \| (-?[\d.]+) \|", re.MULTILINE)
FIGURES = re.compile(r"```json\n(.*?)\n```", re.DOTALL)


def condition(flow: jf.Flow, n: int) -> dict[str, Any]:
    """Labels in turn, if the flow has any."""
    return {"labels": torch.arange(n) % flow.num_classes} if flow.num_classes else {}


def draw_samples(flow: jf.Flow, path: Path) -> None:
    """Exact samples of seed 0, the labels in turn. Fields of a lattice are scaled to their largest value."""
    x = flow.sample(SHOWN, seed=0, plan="sequential", **condition(flow, SHOWN)).x
    white = x.abs().max() if flow.family == "lattice" else 1.0
    save_images(x / white, path, columns=COLUMNS, zoom=3 if math.prod(flow.data_shape) < 28**2 else 2)


def draw_training(card: str, path: Path) -> None:
    """The losses in the table of a card, as curves."""
    rows = [[float(x) for x in row] for row in EPOCH.findall(card)]
    if not rows:
        return
    epochs, training, validation = zip(*rows, strict=True)
    with sheet(path, size=(6.0, 3.2)) as axes:
        (ax,) = axes.flat
        ax.plot(epochs, training, color=BLUE, marker="o", label="training")
        ax.plot(epochs, validation, color=ORANGE, marker="s", label="validation")
        ax.set(xlabel="epoch", ylabel="loss (nats per dimension)")
        ax.legend()


def count_sweeps(flow: jf.Flow) -> dict[str, Any]:
    """Sweeps per block and deviation of both plans that sweep, at the default tolerance."""
    z, plans = flow.noise(SWEPT, seed=0), ("uniform", "selective")
    rows, _ = compare(flow, z, plans, [SWEPT], repeats=1, condition=lambda n: condition(flow, n))
    return {row.plan: {"per_block": row.sweeps, "largest_deviation": row.largest} for row in rows}


def main(names: list[str]) -> None:
    for name in names or bundled_names():
        path, flow = MODELS / name / "README.md", jf.load(name)
        card = path.read_text(encoding="utf-8")
        draw_samples(flow, path.parent / "samples.png")
        draw_training(card, path.parent / "training.png")
        found = FIGURES.search(card)
        if found:
            figures = json.loads(found[1]) | {"sweeps": count_sweeps(flow)}
            listing = json.dumps(figures, indent=2)
            path.write_text(card.replace(found[1], listing), encoding="utf-8")
            print(name, json.dumps(figures["sweeps"]))


if __name__ == "__main__":
    main(sys.argv[1:])
