"""Samples for as many seconds as it is told, at changing batch sizes (the second argument is the largest) and
plans, and prints how memory went. First comes the largest batch in every way; the warm-up ends with the first
tenth of the time, and growth is counted from there:

peak: the most that was ever held, before and at the end of each tenth of the time;
kept: what is held between draws at those moments, once the allocator has given back what it keeps for later.
"""

from __future__ import annotations

import ctypes
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


def kept() -> int:
    """Bytes of memory that this process cannot do without."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most bytes that this process ever held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


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
    draw, every, draws, samples = random.Random(0), list(kinds()), 0, 0
    for _ in range(2):
        for flow, options in every:
            flow.sample(batch, seed=0, **options)
    found = {"peak": [peak()], "kept": [kept()]}
    began, worked = time.monotonic(), time.process_time()
    for tenth in range(1, 11):
        while time.monotonic() < began + seconds * tenth / 10:
            flow, options = draw.choice(every)
            count = draw.randint(1, batch)
            flow.sample(count, seed=draws, **options)
            draws, samples = draws + 1, samples + count
        found["peak"].append(peak())
        found["kept"].append(kept())
        print(found, file=sys.stderr, flush=True)
    growth = {name: max(values) / values[1] - 1 for name, values in found.items()}
    about = {
        "seconds": seconds,
        "processor": time.process_time() - worked,
        "draws": draws,
        "samples": samples,
    }
    print(json.dumps(about | found | {"growth": growth}))


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
