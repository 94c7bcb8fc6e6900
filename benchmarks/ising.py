"""Sampling `ising-16` by sweeps and one site at a time: `python -m benchmarks.ising`.

Agreement is of samples from the same noise. "full passes" is sequential decoding as libraries without a cache
do it, one pass over all sites for each site. All but selective sweeps are timed on fewer samples, and the
seconds for all are in proportion.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jacobiflow as jf


def full_passes(flow: jf.Flow, z: Tensor) -> Tensor:
    """Every block inverted by as many passes as it has positions, none of them cached."""
    seq = flow.to_prior(z)
    with torch.no_grad():
        for block, order in flow.bound_blocks(len(z)):
            seq = seq if order is None else seq[:, order]
            x = torch.zeros_like(seq)
            for _ in range(block.length):
                x, _ = block.inverse(seq, block.params(x, 0, block.length))
            seq = x if order is None else x[:, order.argsort()]
        return flow.from_sequence(seq)


def seconds(run: Callable[[Tensor], object], flow: jf.Flow, n: int, batch: int) -> float:
    """Of drawing n samples, `batch` at a time; the noise is drawn before."""
    z = flow.noise(min(n, batch), seed=1)
    run(z[:8])  # warm up
    total = 0.0
    for start in range(0, n, batch):
        began = time.perf_counter()
        run(z[: n - start])
        total += time.perf_counter() - began
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="ising-16")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument(
        "--sequential", type=int, default=10_000, help="samples to time sequential decoding on"
    )
    parser.add_argument("--uniform", type=int, default=1000, help="samples to time uniform sweeps on")
    parser.add_argument("--full-passes", type=int, default=200, help="samples to time full passes on")
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--check", type=int, default=1000, help="samples to compare")
    parser.add_argument("--out", type=Path, default=Path("out/ising.json"))
    args = parser.parse_args()
    flow = jf.load(args.model)
    z = flow.noise(args.check, seed=0)
    exact = flow.decode(z, "sequential")
    swept = flow.decode(z, "selective")
    doc: dict[str, Any] = {
        "model": args.model,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "batch": args.batch,
        "sweeps_a_block": [b.sweeps.double().mean().item() for b in swept.stats.blocks],
        "agreement": {
            "samples": args.check,
            "largest_deviation": (swept.x - exact.x).abs().max().item(),
            "largest_deviation_of_log_det": (swept.log_det - exact.log_det).abs().max().item(),
            "spread_of_x": exact.x.std().item(),
        },
        "rows": [],
    }

    def by(plan: str) -> Callable[[Tensor], object]:
        return lambda z: flow.decode(z, plan)

    runs: dict[str, tuple[Callable[[Tensor], object], int, int]] = {
        "selective sweeps": (by("selective"), args.samples, args.batch),
        "sequential": (by("sequential"), args.sequential, args.batch),
        "uniform sweeps": (by("uniform"), args.uniform, args.batch),
        "full passes": (lambda z: full_passes(flow, z), args.full_passes, args.batch),
        "selective sweeps, 64": (by("selective"), 320, 64),
        "sequential, 64": (by("sequential"), 320, 64),
        "selective sweeps, one": (by("selective"), 5, 1),
        "uniform sweeps, one": (by("uniform"), 5, 1),
        "sequential, one": (by("sequential"), 5, 1),
    }
    for name, (run, n, batch) in runs.items():
        if n:
            took = seconds(run, flow, n, batch)
            row = {"method": name, "samples": n, "batch": batch, "seconds": took}
            row["seconds_for_all"] = took / n * args.samples
            doc["rows"].append(row)
            print(f"{name:22s} {n:7d} samples, batch {batch:5d} {took:9.3f} s", flush=True)
    print(json.dumps(doc["agreement"]))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(doc, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
