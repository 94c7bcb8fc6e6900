"""Samples for as many processor seconds as it is told, at changing batch sizes (the second argument is the
largest) and plans, and prints how memory went: the most that was held between two draws, in the warm-up and
in each tenth of the time after it.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import jacobiflow as jf

WINDOWS = jf.Method(width=8, tol=1e-3)


def held() -> int:
    """Bytes of memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def kinds() -> Iterator[tuple[jf.Flow, dict[str, Any]]]:
    """Flows, each with all the ways in which it is sampled."""
    image, vector = jf.load("mnist"), jf.load("mnist-maf")
    for flow in (image, vector):
        for plan in ("sequential", "uniform", "selective", jf.Plan((WINDOWS,) * len(flow.blocks))):
            yield flow, {"plan": plan}
    yield image, {"labels": 3, "guidance": 1.5}
    yield image, {"labels": 3, "denoise": True}
    yield vector, {"check": True, "cache": False, "plan": "uniform"}
    yield vector, {"tol": 1e-2, "init": "noise"}


def main(seconds: float, batch: int) -> None:
    torch.set_num_threads(1)
    draw, every, draws = random.Random(0), list(kinds()), 0
    warm = 0
    for _ in range(2):
        for flow, options in every:
            flow.sample(batch, seed=0, **options)
            warm = max(warm, held())
    began, after = time.process_time(), [0] * 10
    while (share := (time.process_time() - began) / seconds) < 1:
        flow, options = draw.choice(every)
        flow.sample(draw.randint(1, batch), seed=draws, **options)
        draws += 1
        after[int(10 * share)] = max(after[int(10 * share)], held())
    print(json.dumps({"draws": draws, "warm-up": warm, "after": after}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
