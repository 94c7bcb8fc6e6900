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
STATUS = Path("/proc/self/status")  # of this process


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
        return min(float(total), _figure(CONTROL / "memory.max"))
    return math.inf


def available_memory() -> float:
    """Bytes of memory that are free now."""
    free = min(total_memory(), 1024 * _figure(Path("/proc/meminfo"), "MemAvailable:"))
    limit, used = _figure(CONTROL / "memory.max"), _figure(CONTROL / "memory.current")
    return free if math.inf in (limit, used) else min(free, max(limit - used, 0.0))


def used_memory() -> float:
    """Bytes of memory that this process holds now; 0 if unknown."""
    return 1024 * _figure(STATUS, "VmRSS:", otherwise=0.0)


def peak_memory() -> int:
    """The most bytes of memory that this process has held; on Linux since they were reset."""
    if peak := _figure(STATUS, "VmHWM:", otherwise=0.0):
        return 1024 * int(peak)
    import resource  # not on every system

    return (1 if sys.platform == "darwin" else 1024) * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@contextmanager
def memory_limit(gigabytes: float) -> Iterator[None]:
    """Make allocations fail that would take this process over a limit (0: none), before the system kills it."""
    import resource  # not on every system

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = int(gigabytes * BILLION) if gigabytes else soft
    resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _figure(path: Path, name: str = "", otherwise: float = math.inf) -> float:
    """The number after `name` in a file of Linux; "max" is none."""
    with suppress(OSError):
        if found := re.search(rf"{name}\s*(\d+)", path.read_text()):
            return float(found[1])
    return otherwise


def available_cores() -> int:
    """Processor cores that this process may use, by its affinity and the limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # "max" means no limit
        quota, period = map(int, (CONTROL / "cpu.max").read_text().split())
        return min(cores, math.ceil(quota / period))
    return cores


def busy_elsewhere() -> float:
    """Seconds of processor time that other processes have had so far; 0 where the system does not tell."""
    with suppress(OSError, ValueError):
        user, nice, system, _, _, _, _, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
        return (user + nice + system + stolen) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])
    return 0.0


def out_of_memory(error: BaseException) -> bool:
    """Whether numpy, Python or torch (on any device) ran out of memory."""
    said = any(words in str(error) for words in ("DefaultCPUAllocator", "could not create a primitive"))  # by oneDNN
    return said or isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


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
