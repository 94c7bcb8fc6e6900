"""Our decoding against peers on the same weights: `python -m benchmarks.speed`.

Runs alternate between the contestants; each row is the median of its runs, as a ratio to the peer,
with the largest deviation from exact sequential decoding beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks.peers import NflowsMAF, plain_tarflow

Contestants = dict[str, Callable[[], Tensor]]


def race(title: str, peer: str, runs: Contestants, exact: Tensor, repeats: int) -> list[dict[str, Any]]:
    """Rows of all contestants, the peer's first."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    outs: dict[str, Tensor] = {}
    for i in range(repeats + 1):
        for name, run in runs.items():
            began = time.perf_counter()
            outs[name] = run()
            if i:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    base = statistics.median(seconds[peer])
    rows = []
    for name in runs:
        middle = statistics.median(seconds[name])
        row = {"what": title, "method": name, "seconds": middle, "ratio": base / middle}
        row["deviation"] = (outs[name] - exact).abs().max().item()
        rows.append(row)
        print(
            f"{title:34s} {name:24s} {middle:9.4f} s {base / middle:7.2f}x  {row['deviation']:.2g}",
            flush=True,
        )
    return rows


def tarflow_rows(model: str, batches: list[int], repeats: int) -> list[dict[str, Any]]:
    flow = jf.load(model)
    assert isinstance(flow, jf.TarFlow)
    rows = []
    for n in batches:
        z, labels = flow.noise(n, seed=0), torch.arange(n) % 10
        exact = flow.decode(z, "sequential", labels=labels).x
        runs: Contestants = {"plain loop": lambda z=z, y=labels: plain_tarflow(flow, z, y)}
        for plan in ("sequential", "uniform", "selective"):
            runs[plan] = lambda z=z, y=labels, p=plan: flow.decode(z, p, labels=y).x
        rows += race(f"{Path(model).name}, batch {n}", "plain loop", runs, exact, repeats)
    return rows


def maf_rows(model: str, batches: list[int], repeats: int) -> list[dict[str, Any]]:
    flow = jf.load(model)
    assert isinstance(flow, jf.MAF)
    peer = NflowsMAF(flow)
    rows = []
    for n in batches:
        z = flow.noise(n, seed=0)
        exact = flow.decode(z, "sequential").x
        began = time.perf_counter()
        theirs = peer.inverse(z)
        slow = time.perf_counter() - began
        runs: Contestants = {
            "sequential": lambda z=z: flow.decode(z, "sequential").x,
            "selective": lambda z=z: flow.decode(z, "selective").x,
        }
        print(f"nflows, once: {slow:.2f} s, deviation {(theirs - exact).abs().max():.2g}")
        found = race(f"{Path(model).name}, batch {n}", "sequential", runs, exact, repeats)
        rows += [row | {"against": "nflows", "ratio": slow / row["seconds"]} for row in found]
        for row in rows[-2:]:
            print(f"    {row['method']} against nflows: {row['ratio']:.0f}x")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="mnist")
    parser.add_argument("--maf", default="mnist-maf")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--maf-batches", type=int, nargs="+", default=[1, 100])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("out/speed.json"))
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if args.model != "none":
        rows += tarflow_rows(args.model, args.batches, args.repeats)
    if args.maf != "none":
        rows += maf_rows(args.maf, args.maf_batches, args.repeats)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    doc = {"threads": torch.get_num_threads(), "torch": torch.__version__, "rows": rows}
    args.out.write_text(json.dumps(doc, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
