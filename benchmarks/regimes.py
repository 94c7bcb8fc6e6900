"""The map of regimes: where sequential decoding, sliding windows or whole sweeps win on this machine.

One block of 4 layers with random weights, by width, length and batch. Measured are one position of
sequential decoding, one sweep of each window width and one whole sweep; where the backend splits a batch,
one part of it. The map follows for blocks that whole sweeps solve in S sweeps: a window of w positions then
takes about S + 2 (T - 1) / w sweeps (`--rule` compares this with the profiles of the bundled models). Cells
that are measured stay in docs/bench/regimes.json, so that a run continues where the last one ended:

    make bench ARGS="regimes --only 768"; make bench ARGS="regimes --check"
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import jacobiflow as jf
from benchmarks.harness import ROOT, about_machine
from jacobiflow.flows.checkpoint import bundled_names

WIDTHS, LENGTHS, BATCHES = (128, 256, 512, 768), (64, 256, 1024), (1, 4, 16, 64)
WINDOWS = (8, 16, 32, 64)
LAYERS = 4
SWEEPS = (4, 12, 36)  # of whole-sequence solves: an easy block, a harder one, the block next to the noise
START = 2  # sweeps per w positions that a window takes, beyond the sweeps of the whole sequence
STEPS = 16  # positions that sequential decoding is timed on, in the middle of the sequence
ENOUGH_SECONDS = 0.15  # of runs per figure
ONCE_SECONDS = 20.0  # a run that takes longer is not repeated
CHECKED = ((128, 64, 64), (128, 256, 4), (256, 256, 1), (256, 1024, 16), (768, 64, 1), (768, 256, 4))
PAGE = ROOT / "docs/regimes.md"
Cell = dict[str, Any]


def block_of(width: int, length: int, batch: int) -> tuple[jf.Block, torch.Tensor]:
    """A block that moves under sweeps, and noise for it."""
    torch.manual_seed(0)
    size = 2 * math.isqrt(length)
    config = jf.TarFlowConfig(
        image_size=size, image_channels=3, patch_size=2, width=width, blocks=1, layers_per_block=LAYERS
    )
    flow = jf.TarFlow(config).requires_grad_(False)
    for name, p in flow.named_parameters():
        if p.ndim == 2 and "embed" not in name:
            p += 0.2 / p.shape[1] ** 0.5 * torch.randn(p.shape)
    return flow.bound_blocks(batch)[0], flow.noise(batch, seed=0)


def shortest(run: Callable[[], object]) -> float:
    """Seconds of the shortest run; the first one counts only if it is long."""
    times, began = list[float](), time.perf_counter()
    while len(times) < 3 or time.perf_counter() - began < ENOUGH_SECONDS:
        before = time.perf_counter()
        run()
        times.append(time.perf_counter() - before)
        if times[-1] > 1:
            break
    return min(times)


@torch.inference_mode()
def measure(width: int, length: int, batch: int) -> Cell:
    """Seconds for the whole batch: of all positions in turn, and of one sweep by window width."""
    block, z = block_of(width, length, batch)
    rows = min(batch, block.engine.rows or batch)
    part, z = block.select(torch.arange(rows)), z[:rows]
    engine, x = part.engine, z.clone()
    cache, steps = engine.new_cache(rows), min(STEPS, length - 1)

    def sweep(start: int, w: int) -> None:
        engine.inverse(z[:, start : start + w], engine.params(x, start, w, cache))

    scale, half = batch / rows, length // 2
    whole = shortest(partial(sweep, 1, length - 1))
    windows = {w: shortest(partial(sweep, half, w)) for w in WINDOWS if w <= half}
    first, slope = (length - steps) // 2, z.new_zeros(rows, length)
    one = shortest(partial(engine.solve, x, z, slope, first, first + steps, cache)) / steps
    return {
        "width": width,
        "length": length,
        "batch": batch,
        "sequential": scale * one * (length - 1),
        "whole": scale * whole,
        "windows": {str(w): scale * seconds for w, seconds in windows.items()},
    }


def window_sweeps(sweeps: float, length: int, w: int) -> float:
    """Sweeps of a window of w positions where whole sweeps take so many."""
    return min(sweeps + START * (length - 1) / w, length - 1)


def methods(cell: Cell, sweeps: float) -> dict[str, float]:
    """Seconds by method, for a block that whole sweeps solve in so many."""
    found = {
        "sequential": cell["sequential"],
        "whole sweeps": cell["whole"] * min(sweeps, cell["length"] - 1),
    }
    for w, seconds in cell["windows"].items():
        found[f"window of {w}"] = seconds * window_sweeps(sweeps, cell["length"], int(w))
    return found


def winner(cell: Cell, sweeps: float) -> tuple[str, float]:
    """The fastest method, and how much faster than sequential decoding it is."""
    found = methods(cell, sweeps)
    best = min(found, key=lambda name: found[name])
    return best, found["sequential"] / found[best]


def check(cell: Cell) -> list[Cell]:
    """Whole runs of a cell beside what its timings predict for as many sweeps."""
    block, z = block_of(cell["width"], cell["length"], cell["batch"])
    rows = []
    for method in (jf.Method(width=1), jf.Method(tol=1e-3), jf.Method(width=32, tol=1e-3)):
        times, sweeps = list[float](), 0.0
        for _ in range(7):
            out = jf.decode(block, z, method)
            times.append(out.stats.seconds)
            sweeps = float(out.stats.blocks[0].sweeps.double().mean())
            if times[-1] > ONCE_SECONDS:
                break
        per_sweep = cell["whole"] if method.width is None else cell["windows"].get("32", math.nan)
        predicted = cell["sequential"] if method.width == 1 else per_sweep * sweeps
        seconds = statistics.median(times)
        named = {None: "whole sweeps", 1: "sequential", 32: "window of 32"}[method.width]
        rows.append(
            {name: cell[name] for name in ("width", "length", "batch")}
            | {"method": named, "runs": len(times), "sweeps": sweeps}
            | {"seconds": seconds, "predicted": predicted, "ratio": seconds / predicted}
        )
        print("   ", rows[-1], flush=True)
    return rows


def rule() -> None:
    """Sweeps of windows in the profiles of the bundled models, over those that `window_sweeps` predicts."""
    for name in bundled_names():
        flow, ratios = jf.load(name), list[float]()
        for cells in flow.profile.entries[0].blocks if isinstance(flow, jf.TarFlow) and flow.profile else ():
            near = [c for c in cells if c.deviation <= flow.default_deviation and c.precision == "float32"]
            fewest = {
                w: min((statistics.mean(c.sweeps) for c in near if c.width == w), default=math.nan)
                for w in (None, *WINDOWS)
            }
            length = flow.sequence_shape[0]
            ratios += [fewest[w] / window_sweeps(fewest[None], length, w) for w in WINDOWS if w < length]
        if known := [r for r in ratios if math.isfinite(r)]:
            print(f"{name}: {min(known):.2f} to {max(known):.2f}, median {statistics.median(known):.2f}")


def draw(cells: list[Cell], path: Path) -> None:
    """One panel per width and number of sweeps: the winner of each length and batch, and its gain."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    colors = {"sequential": "#9aa5b1", "window": "#f2b84b", "whole": "#4c9f70"}
    figure = Figure(figsize=(11, 7.6), layout="constrained")
    axes = figure.subplots(len(SWEEPS), len(WIDTHS), sharex=True, sharey=True)
    for i, sweeps in enumerate(SWEEPS):
        for j, width in enumerate(WIDTHS):
            ax = axes[i][j]
            for cell in (c for c in cells if c["width"] == width):
                x, y = LENGTHS.index(cell["length"]), BATCHES.index(cell["batch"])
                best, gain = winner(cell, sweeps)
                ax.add_patch(_square(x, y, colors[best.split()[0]]))
                name = {"sequential": "one by\none", "whole": "whole"}.get(best.split()[0], f"w {best.split()[-1]}")
                text = name if best == "sequential" else f"{name}\n{gain:.1f}x"
                ax.text(x, y, text, ha="center", va="center", fontsize=9)
            ax.set_xlim(-0.5, len(LENGTHS) - 0.5)
            ax.set_ylim(-0.5, len(BATCHES) - 0.5)
            ax.set_xticks(range(len(LENGTHS)), LENGTHS)
            ax.set_yticks(range(len(BATCHES)), BATCHES)
            if not i:
                ax.set_title(f"width {width}")
            if not j:
                ax.set_ylabel(f"{sweeps} whole sweeps\nbatch")
            if i == len(SWEEPS) - 1:
                ax.set_xlabel("length T")
    names = {"sequential": "sequential decoding", "window": "sliding windows", "whole": "whole sweeps"}
    handles = [Patch(color=colors[key], label=name) for key, name in names.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=3, frameon=False)
    figure.savefig(path, dpi=110)


def filled(text: str, doc: Mapping[str, Any]) -> str:
    """The page with the table of whole runs made anew."""
    heads = ("width", "length", "batch", "method", "runs", "sweeps", "seconds", "predicted", "ratio")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in doc["checks"]:
        cells = (f"{row[h]:.3g}" if isinstance(row[h], float) else str(row[h]) for h in heads)
        lines.append("| " + " | ".join(cells) + " |")
    source = f"commit {doc['commit']}, {doc['cpu']}, {doc['threads']} threads"
    table = "\n".join(lines) + f'\n\n`make bench ARGS="regimes --check"`, {source}.\n'
    table = table if doc["checks"] else 'Not measured yet: `make bench ARGS="regimes --check"`.\n'
    return re.sub(r"(<!-- checks -->\n).*?(<!-- end -->)", rf"\g<1>{table}\g<2>", text, flags=re.DOTALL)


def _square(x: int, y: int, color: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="white", linewidth=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", default=list(WIDTHS), help="widths to measure")
    parser.add_argument("--again", action="store_true", help="measure cells again that are there")
    parser.add_argument("--check", action="store_true", help="verify six cells by whole runs")
    parser.add_argument("--rule", action="store_true", help="compare the rule with bundled profiles")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/bench")
    args = parser.parse_args()
    if args.rule:
        rule()
        return
    path = args.out / "regimes.json"
    doc = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"cells": [], "checks": []}
    found = {(c["width"], c["length"], c["batch"]): c for c in doc["cells"]}

    def write() -> None:
        doc.update(about_machine(), cells=list(found.values()))
        path.write_text(json.dumps(doc, indent=1) + "\n", encoding="utf-8")

    if args.check and not all(key in found for key in CHECKED):
        parser.error("cells are missing: run it without --check first")
    for key in [(w, t, b) for w in args.only for t in LENGTHS for b in BATCHES]:
        if args.again or (key not in found and not args.check):
            found[key] = measure(*key)
            print(f"{key}: " + ", ".join(f"{s} sweeps {winner(found[key], s)}" for s in SWEEPS), flush=True)
            write()
    if args.check:
        doc["checks"] = [row for key in CHECKED for row in check(found[key])]
        write()
    draw(list(found.values()), args.out / "regimes.png")
    if args.out.resolve() == (ROOT / "docs/bench").resolve():
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), doc), encoding="utf-8")


if __name__ == "__main__":
    main()
