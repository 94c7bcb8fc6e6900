"""plan="auto" against the best fixed plan at each batch size: `python -m benchmarks.auto`.

A fixed plan competes if its largest deviation from sequential decoding, over the same samples as
auto's, is within the bound. All are timed once; the fastest then run in turn with auto, and a row has
the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jacobiflow as jf

ROWS = 64  # samples, at least, that deviations are measured on
FINALISTS = 3


def fixed_plans(flow: jf.Flow, bound: float) -> dict[str, jf.Plan]:
    """Sequential, uniform, selective, and windows in all blocks or in all but the first."""
    blocks = len(flow.blocks)
    plans = {"sequential": flow.plan("sequential")}
    for tol in (10 * bound, 3 * bound, bound, 0.1 * bound):
        plans |= {f"{name} {tol:g}": flow.plan(name, tol=tol) for name in ("uniform", "selective")}
        for width in (8, 16, 32):
            method = jf.Method(width=width, tol=tol)
            plans[f"windows {width} {tol:g}"] = jf.Plan((method,) * blocks)
            plans[f"windows {width} {tol:g}, first sequential"] = jf.Plan(
                (jf.Method(width=1), *(method,) * (blocks - 1))
            )
    return plans


def row(flow: jf.Flow, batch: int, repeats: int) -> dict[str, Any]:
    n, bound = max(batch, ROWS), flow.default_deviation
    z = flow.noise(n, seed=0)
    labels = torch.arange(n) % flow.num_classes if flow.num_classes else None

    def decode(plan: jf.Plan, rows: slice) -> Tensor:
        return flow.decode(z[rows], plan, labels=None if labels is None else labels[rows]).x

    def seconds(plan: jf.Plan, turn: int) -> float:
        begin = turn * batch % (n - batch + 1)
        began = time.perf_counter()
        decode(plan, slice(begin, begin + batch))
        return time.perf_counter() - began

    began = time.perf_counter()
    auto = flow.plan("auto", n=batch, labels=None if labels is None else labels[:batch])
    tuning = time.perf_counter() - began
    every = slice(0, n)
    fixed = fixed_plans(flow, bound)
    exact = decode(fixed["sequential"], every)
    off = {name: (decode(p, every) - exact).abs().max().item() for name, p in fixed.items()}
    off["auto"] = (decode(auto, every) - exact).abs().max().item()
    rivals = {name: min(seconds(p, 0) for _ in range(2)) for name, p in fixed.items() if off[name] <= bound}
    names = ["auto", *sorted(rivals, key=lambda name: rivals[name])[:FINALISTS]]
    times: dict[str, list[float]] = {name: [] for name in dict.fromkeys([*names, "sequential"])}
    for turn in range(repeats):
        for name, found in times.items():
            found.append(seconds(auto if name == "auto" else fixed[name], turn))
    middle = {name: statistics.median(found) for name, found in times.items()}
    best = min((name for name in middle if name != "auto"), key=lambda name: middle[name])
    return {
        "batch": batch,
        "auto_seconds": middle["auto"],
        "auto_deviation": off["auto"],
        "best_fixed": best,
        "best_fixed_seconds": middle[best],
        "best_fixed_deviation": off[best],
        "ratio": middle[best] / middle["auto"],
        "over_sequential": middle["sequential"] / middle["auto"],
        "tuning_seconds": tuning,
        "plan": [[m.width, m.tol, m.init] for m in auto],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mnist")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("out/auto.json"))
    args = parser.parse_args()
    flow = jf.load(args.model)
    rows = []
    for batch in args.batches:
        rows.append(row(flow, batch, args.repeats))
        r = rows[-1]
        print(
            f"{args.model}, batch {batch:3d}: auto {r['auto_seconds']:.4f} s, deviation "
            f"{r['auto_deviation']:.2g}, {r['ratio']:.2f}x of the best fixed plan ({r['best_fixed']}), "
            f"{r['over_sequential']:.2f}x of sequential; tuned in {r['tuning_seconds']:.1f} s",
            flush=True,
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    doc = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}
    args.out.write_text(json.dumps(doc, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
