"""Threads of torch's operators and of the C kernels."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from jacobiflow.kernels.build import library_for

SMALL_NUMEL = 1 << 18  # up to this size a second thread of torch's operators does not pay


class _Threads(threading.local):
    count: int | None = None


_threads = _Threads()


def thread_count() -> int:
    """Threads that a C function may use."""
    return _threads.count or torch.get_num_threads()


@contextmanager
def torch_single_threaded(like: Tensor) -> Iterator[None]:
    """Run torch's operators on one thread if the tensors are small, beside C functions on all threads.

    Torch's other threads wait for work by spinning, which takes the processor from those of the C functions.
    """
    count, pool = torch.get_num_threads(), openmp()
    if count == 1 or pool is None or like.numel() > SMALL_NUMEL or library_for(like) is None:
        yield
        return
    pool.omp_set_num_threads(1)
    _threads.count, before = count, _threads.count
    try:
        yield
    finally:
        _threads.count = before
        pool.omp_set_num_threads(count)


@cache
def openmp() -> ctypes.CDLL | None:
    """The thread pool of torch's operators, if it can be found.

    Its setting is the calling thread's own. `torch.set_num_threads` would also set what every thread
    that is born meanwhile takes for good.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = {line.split(maxsplit=5)[5] for line in maps if "omp" in line.rpartition("/")[2]}
    pools = [path for path in found if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    torch_own = str(Path(torch.__file__).parent)
    for path in sorted(pools, key=lambda p: not p.startswith(torch_own)):
        try:
            pool = ctypes.CDLL(path)
            pool.omp_set_num_threads.argtypes, pool.omp_set_num_threads.restype = [c_int], None
        except (OSError, AttributeError):
            continue
        if _is_torchs(pool):
            return pool
    return None


def _is_torchs(pool: ctypes.CDLL) -> bool:
    count = torch.get_num_threads()
    pool.omp_set_num_threads(count + 1)
    found = torch.get_num_threads() == count + 1
    pool.omp_set_num_threads(count)
    return found
