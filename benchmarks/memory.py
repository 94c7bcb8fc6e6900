"""Peak memory: whole-sequence sweeps without a cache against sequential decoding with one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from benchmarks.harness import ROOT, Row

CASES = {"mnist-small": (16, 256), "mnist-maf": (100, 1000), "ising-16": (100, 1000)}
ONE = """
import json, sys
from pathlib import Path
import jacobiflow as jf

name, n, plan, cache = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4] == "True"
flow = jf.load(name)
flow.decode(flow.noise(1, seed=0), plan, cache=cache)  # what the first use pays for
z = flow.noise(n, seed=0)
Path("/proc/self/clear_refs").write_text("5")  # the peak is from here on


def size(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


before = size("VmRSS")
flow.decode(z, plan, cache=cache)
print(json.dumps(size("VmHWM") - before))
"""


def peak(name: str, n: int, plan: str, cache: bool) -> int:
    """Bytes by which decoding raises the peak of a process of its own."""
    command = [sys.executable, "-c", ONE, name, str(n), plan, str(cache)]
    frugal = os.environ | {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
    }  # give back at once
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=frugal)
    return int(json.loads(done.stdout.splitlines()[-1]))


def rows(repeats: int) -> list[Row]:
    found = []
    for name, sizes in CASES.items():
        for n in sizes:
            sequential, whole, kept = (
                peak(name, n, *how) for how in (("sequential", True), ("uniform", False), ("uniform", True))
            )
            row: Row = {"model": name, "samples": n, "sequential_bytes": sequential}
            row |= {"sweeps_no_cache_bytes": whole, "sweeps_cache_bytes": kept}
            row["memory_share"] = whole / max(sequential, 1)
            print("   ", row, flush=True)
            found.append(row)
    return found
