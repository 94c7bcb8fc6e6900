"""Threads of torch's operators and of the C kernels."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import c_int
from functools import cache

import torch
from torch import Tensor

from jacobiflow.kernels.build import library

SMALL_NUMEL = 1 << 18  # up to this size a second thread of torch's operators does not pay

_own = threading.local()  # `count`: threads that C functions may use here, where torch has fewer


def thread_count() -> int:
    """Threads that a C function may use."""
    return getattr(_own, "count", None) or torch.get_num_threads()


@contextmanager
def torch_single_threaded(like: Tensor) -> Iterator[None]:
    """Run torch's operators on one thread if tensors are small: its idle threads spin, and slow the C functions."""
    small = like.is_cpu and like.dtype == torch.float32 and like.numel() <= SMALL_NUMEL
    plain = small and not torch.is_autocast_enabled("cpu") and not torch.is_grad_enabled()
    count = torch.get_num_threads()
    if not plain or count == 1 or library() is None or (pool := openmp()) is None:
        yield
        return
    pool.omp_set_num_threads(1)  # `torch.set_num_threads` would also set what threads that are born meanwhile take
    before, _own.count = getattr(_own, "count", None), count
    try:
        yield
    finally:
        _own.count = before
        pool.omp_set_num_threads(count)


@cache
def openmp() -> ctypes.CDLL | None:
    """The thread pool of torch's operators, whose setting is the calling thread's own; None if it cannot be found."""
    for name in (None, torch._C.__file__):  # what the process has loaded, else what torch is linked with
        with suppress(OSError, AttributeError):
            pool = ctypes.CDLL(name)
            pool.omp_set_num_threads.argtypes, pool.omp_set_num_threads.restype = [c_int], None
            count = torch.get_num_threads()
            pool.omp_set_num_threads(count + 1)
            found = torch.get_num_threads() == count + 1  # it is torch's own
            pool.omp_set_num_threads(count)
            if found:
                return pool
    return None
