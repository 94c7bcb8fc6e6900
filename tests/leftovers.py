"""What the tests of jobs share."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

PATIENCE = 900  # seconds
SMALL = ("--format", "npz", "-n", "22", "--labels", "0-2", "--shard", "8", "--batch", "4", "--seed", "5")


def files(out: Path) -> dict[str, str]:
    """All that a job has left, but for the lock, which names a process; by content."""
    found = (p for p in out.rglob("*") if p.is_file() and p.name != ".lock")
    return {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in found}


def samples(out: Path) -> dict[str, np.ndarray]:
    """The arrays of all shards, one after the other."""
    parts = [np.load(p) for p in sorted(out.glob("shards/*.npz"))]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0].files}


def limited(size: int) -> str:
    """Code that makes this process unable to write files over `size` bytes, as on a full disk.

    The C library is loaded first: its private copy in memory counts as a file, too.
    """
    return (
        "import resource; from jacobiflow.kernels import build; build.library(); "
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))"
    )


def children(pid: int) -> list[int]:
    """The process ids of the children of a process."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(*args: object, before: str = "pass") -> subprocess.Popen[str]:
    """The real command in a process of its own, after `before`."""
    code = f"import sys, runpy; {before}; runpy.run_module('jacobiflow.cli.main', run_name='__main__')"
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
