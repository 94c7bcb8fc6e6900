"""The import graph: `python docs/tools/graph.py` writes docs/images/imports.svg from the real imports.

A box is a layer with its modules. An arrow leads from a layer to each layer that its modules import from; its
width grows with the number of imports. Arrows only point down: import-linter checks that.
"""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections import Counter
from pathlib import Path

import grimp
import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
RULES = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
LAYERS = [name.strip("()") for name in RULES["contracts"][0]["layers"]]  # from the top


def read() -> tuple[dict[str, list[str]], Counter[tuple[str, str]]]:
    """The modules of each layer, and the number of imports between layers."""
    graph = grimp.build_graph("jacobiflow", cache_dir=None)
    modules: dict[str, list[str]] = {}
    arrows: Counter[tuple[str, str]] = Counter()
    for module in sorted(graph.modules):
        layer, _, name = module.partition(".")[2].partition(".")
        if layer not in LAYERS:
            continue
        if name:
            modules.setdefault(layer, []).append(name)
        for other in graph.find_modules_directly_imported_by(module):
            target = f"{other}.".split(".")[1]
            if target in LAYERS and target != layer:
                arrows[layer, target] += 1
    return modules, arrows


def main(folder: Path = IMAGES) -> None:
    """Write the picture."""
    matplotlib.rcParams["svg.hashsalt"] = "jacobiflow"  # the same graph gives the same file
    modules, arrows = read()
    layers = [name for name in LAYERS if name in modules]
    figure = Figure(figsize=(7.8, 0.95 * len(layers)))  # inches of the guide's column
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, 7.8)
    ax.set_ylim(-len(layers), 0)
    ax.set_axis_off()
    for row, name in enumerate(layers):
        y = -row - 0.5
        shape: dict[str, str] = {"boxstyle": "round,pad=0.02", "fc": "#eef2f8", "ec": "#6b7f99"}
        ax.add_patch(FancyBboxPatch((1.7, y - 0.4), 6.0, 0.8, **shape))
        ax.text(1.8, y, name, va="center", fontsize=12, weight="bold")
        text = textwrap.fill("  ".join(modules[name]), 66, break_on_hyphens=False)
        ax.text(2.8, y, text, va="center", fontsize=9.5, color="#33415c", linespacing=1.2)
    for (top, low), count in sorted(arrows.items()):
        a, b = layers.index(top), layers.index(low)
        reach = 0.14 * (b - a)
        ax.add_patch(
            FancyArrowPatch(
                (1.68, -a - 0.5 - 0.12),
                (1.68, -b - 0.5 + 0.12),
                connectionstyle=f"arc3,rad={min(0.95, 0.28 + 0.6 / (b - a) * reach)}",
                arrowstyle="-|>",
                mutation_scale=8,
                linewidth=0.5 + 0.12 * min(count, 20),
                color=f"C{b % 10}",
                alpha=0.75,
            )
        )
    figure.savefig(folder / "imports.svg", metadata={"Date": None})


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
