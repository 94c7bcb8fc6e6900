"""In which C functions sequential decoding spends its time, as the profiler `perf` of Linux samples it.

The compiled functions are loaded from memory, so their names are looked up in the file of the cache folder.
"""

from __future__ import annotations

import bisect
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter

import torch

import jacobiflow as jf
from benchmarks.before import tame
from benchmarks.harness import ROOT, Row
from jacobiflow.core.files import cache_folder
from jacobiflow.kernels.build import version

SECONDS = 12.0
LATER = 5000  # milliseconds for imports and the first run
CASES = (("mnist", 1), ("mnist", 16), ("mnist", 64), ("cifar", 1), ("cifar", 16), ("cifar", 64))
SHARES = {
    "products": r"tile\d|fetch\d|pairs\d|product|multiply",
    "attention": r"attend|soften",
    "waiting": r"arrive|worker|wait_for.*|meet.*",
}
SAMPLE = re.compile(r"\s*([\d.]+)%\s+(\S+).*\[.\] (\S+)")


def run(model: str, n: int) -> None:
    """What is profiled: sequential decoding, over and over, and its milliseconds."""
    flow = tame("cifar", 1) if model == "cifar" else jf.load(model)
    z, labels = flow.noise(n, seed=0), torch.zeros(n).long() if flow.num_classes else None
    flow.decode(z, "sequential", labels=labels)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < SECONDS:
        flow.decode(z, "sequential", labels=labels)
        count += 1
    print((time.perf_counter() - began) / count)


def functions() -> list[tuple[int, str]]:
    """Where each compiled function begins, in ascending order."""
    path = cache_folder() / "native" / f"{version()}.so"
    lines = subprocess.run(["nm", path], check=True, capture_output=True, text=True).stdout.splitlines()
    found = (line.split() for line in lines if re.match(r"\S+ [tT] ", line))
    return sorted((int(at, 16), name) for at, _, name in found)


def shares(report: str, known: list[tuple[int, str]]) -> Row:
    """The report of perf, summed by what functions do. What is not in the compiled functions is `outside`."""
    begins, spent = [at for at, _ in known], Counter[str]()
    for found in filter(None, map(SAMPLE.match, report.splitlines())):
        percent, file, place = found.groups()
        if not file.startswith("memfd:kernels"):
            spent["outside"] += float(percent) / 100
            continue
        name = known[bisect.bisect(begins, int(place, 16)) - 1][1]
        kind = next((kind for kind, names in SHARES.items() if re.fullmatch(names, name)), "other_kernels")
        spent[kind] += float(percent) / 100
    return {f"{kind}_share": spent[kind] for kind in (*SHARES, "other_kernels", "outside")}


def rows(repeats: int) -> list[Row]:
    """Shares of the CIFAR configuration (one block of random weights) and of `mnist`, by batch."""
    del repeats  # thousands of samples are one figure
    found, known = list[Row](), functions()
    for model, n in CASES:
        with tempfile.NamedTemporaryFile() as data:
            command = [sys.executable, "-m", "benchmarks.shares", model, str(n)]
            sampled = ["perf", "record", "-q", "-F", "1999", "-D", str(LATER), "-o", data.name, *command]
            out = subprocess.run(sampled, check=True, capture_output=True, text=True, cwd=ROOT)
            told = ["perf", "report", "-i", data.name, "--stdio", "--sort", "dso,symbol"]
            report = subprocess.run(told, check=True, capture_output=True, text=True).stdout
        found.append({"model": model, "batch": n, "seconds": float(out.stdout), **shares(report, known)})
        print("   ", found[-1], flush=True)
    return found


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]))
