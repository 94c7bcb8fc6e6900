"""The machine: its processor, its memory, and what running out of memory looks like."""

from __future__ import annotations

import math
import os
import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from jacobiflow.core.types import JacobiflowError

BILLION = 10**9
CONTROL = Path("/sys/fs/cgroup")  # where Linux tells a container its limits


class SizeError(JacobiflowError, ValueError):
    """Something that this machine cannot hold."""


def refuse(what: str, need: int, advice: str) -> None:
    """Raise if `what` needs more bytes than this machine has, whatever is done."""
    limit = memory()
    if need > limit:
        size = min(need, 10**21) // BILLION  # beyond that the number says no more
        raise SizeError(
            f"{what} takes {size:,} GB of memory, this machine has {limit / BILLION:,.0f} GB: {advice}"
        )


def memory() -> float:
    """Bytes of memory of this machine, or of the container that we are in; infinity if nobody tells."""
    with suppress(AttributeError, OSError, ValueError):  # not on every system
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(float(total), _number(CONTROL / "memory.max"))
    return math.inf


def available() -> float:
    """Bytes of memory that can be had now without pushing others out."""
    found = memory()
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = min(found, 1024.0 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]))
    limit, used = _number(CONTROL / "memory.max"), _number(CONTROL / "memory.current")
    return found if math.inf in (limit, used) else min(found, max(limit - used, 0.0))


def _number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # "max" is no limit
        return math.inf


def out_of_memory(error: BaseException) -> bool:
    """Whether this is how numpy, Python or torch (on any device) say that memory has run out."""
    named = type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError) or named


@cache
def machine(device: torch.device) -> str:
    """The name of the processor that does the work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on every system
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
