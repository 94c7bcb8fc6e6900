"""The machine: its processor, its memory, and how libraries report that memory has run out."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import torch

from jacobiflow.core.results import JacobiflowError

BILLION = 10**9
CONTROL = Path("/sys/fs/cgroup")  # limits of a Linux container


class SizeError(JacobiflowError, ValueError):
    """Something that does not fit into the memory of this machine."""


def require_memory(what: str, need: int, advice: str) -> None:
    """SizeError if `what` needs more bytes than this machine has."""
    limit = total_memory()
    if need > limit:
        size = min(need, 10**21) // BILLION  # a larger number says no more
        raise SizeError(f"{what} takes {size:,} GB of memory, this machine has {limit / BILLION:,.0f} GB: {advice}")


def total_memory() -> float:
    """Bytes of memory of this machine, or of the container it runs; infinity if unknown."""
    with suppress(AttributeError, OSError, ValueError):  # not on every system
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return min(float(total), _number(CONTROL / "memory.max"))
    return math.inf


def available_memory() -> float:
    """Bytes of memory that are free now."""
    free = total_memory()
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = min(free, 1024.0 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]))
    limit, used = _number(CONTROL / "memory.max"), _number(CONTROL / "memory.current")
    return free if math.inf in (limit, used) else min(free, max(limit - used, 0.0))


def used_memory() -> float:
    """Bytes of memory that this process holds now; 0 if unknown."""
    with suppress(OSError):
        return float(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0.0


def peak_memory() -> int:
    """The most bytes of memory that this process has held; on Linux since they were reset."""
    with suppress(OSError):
        if found := re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text()):
            return 1024 * int(found[1])
    import resource  # not on every system

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def memory_limit(gigabytes: float) -> Iterator[None]:
    """Make allocations fail that would take this process over a limit; 0 is none.

    An allocation that fails is an error that can be handled. A process that takes too much is killed.
    """
    if not gigabytes:
        yield
        return
    import resource  # not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(gigabytes * BILLION)
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _number(path: Path) -> float:
    try:
        return float(path.read_text())
    except (OSError, ValueError):  # "max" means no limit
        return math.inf


def available_cores() -> int:
    """Processor cores that this process may use, by its affinity and the limit of its container."""
    has_affinity = hasattr(os, "sched_getaffinity")  # not on every system
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max" means no limit
        quota, period = map(int, (CONTROL / "cpu.max").read_text().split())
        return min(cores, math.ceil(quota / period))
    return cores


def busy_elsewhere() -> float:
    """Seconds of processor time that other processes have had so far; 0 where the system does not tell."""
    try:
        user, nice, system, _, _, _, _, stolen, *_ = map(
            int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
        )
    except (OSError, ValueError):
        return 0.0
    mine = os.times()
    own = mine.user + mine.system + mine.children_user + mine.children_system
    return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK") - own


def out_of_memory(error: BaseException) -> bool:
    """Whether numpy, Python or torch (on any device) ran out of memory."""
    said = ("DefaultCPUAllocator", "could not create a primitive")  # the second by oneDNN
    named = type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in said)
    return isinstance(error, MemoryError) or named


@cache
def processor_name(device: torch.device) -> str:
    """The name of the processor that computes."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_facts("model name") or platform.processor() or platform.machine()


def has_bfloat16(device: torch.device) -> bool:
    """Whether the processor has instructions for bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and "bf16" in processor_facts("flags", "Features")


def processor_facts(*names: str) -> str:
    """What Linux says of the first core under one of these names; "" if nothing."""
    with suppress(OSError):  # not on every system
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith(names):
                return line.partition(":")[2].strip()
    return ""
