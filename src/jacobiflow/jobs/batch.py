"""The batch size that memory allows."""

from __future__ import annotations

import math
import resource
import sys
from typing import Any

import torch

from jacobiflow.core.hardware import available, out_of_memory
from jacobiflow.core.plan import Plan
from jacobiflow.core.types import Method
from jacobiflow.flows.flow import Flow
from jacobiflow.jobs.manifest import JobError, Settings
from jacobiflow.jobs.shards import turn

MOST = 256  # more brings little on any device, and makes the end of a batch wait for its slowest sample
PROBE = 4  # samples that memory is measured with
SPARE = 0.4  # share of the free memory that a batch may take: rows that stop are copied out of it
SHARD_BYTES = 64 * 2**20
SHARD_SAMPLES = 1024


def find_batch(flow: Flow, settings: Settings, near: int) -> int:
    """The largest power of two, up to MOST, whose decoding fits into the memory that is free now.

    near: how many processes share this machine's memory.
    """
    device = next(flow.parameters()).device
    count = min(PROBE, settings.n)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available() / near
    try:
        need = _measure(flow, settings, count)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise JobError(f"not even {count} samples fit into memory ({free / 1e9:.1f} GB are free)") from None
    fits = SPARE * free / max(need / count, 1.0)
    if fits < 1:
        raise JobError(
            f"a sample needs {need / count / 1e9:.1f} GB of memory to decode and {free / 1e9:.1f} GB "
            "are free: use a larger machine, or give --batch yourself"
        )
    return int(min(MOST, 2 ** math.floor(math.log2(min(fits, MOST)))))


def _measure(flow: Flow, settings: Settings, count: int) -> int:
    """Bytes that one sweep over whole sequences of `count` samples takes, gradients too if it denoises."""
    device = next(flow.parameters()).device
    sweep = Plan((Method(max_sweeps=1),) * len(flow.blocks))
    labels = turn(settings.labels, 0, count)
    given: dict[str, Any] = {"backend": settings.backend}
    given |= {"guidance": settings.guide_options()} if settings.guidance else {}

    def once(n: int) -> None:
        some = None if labels is None else labels[:n]
        z = flow.noise(n, 0)
        x = flow.decode(z, sweep, labels=some, on_failure="return", warn=False, **given).x
        if settings.denoise:
            flow.denoise(x, labels=some)

    once(1)  # pays for what a flow makes at its first use
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once(count)
        return torch.cuda.max_memory_allocated(device) - before
    before = _peak()
    once(count)
    return _peak() - before


def _peak() -> int:
    """The most memory that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def find_shard(flow: Flow, settings: Settings, batch: int) -> int:
    """Samples a file: whole batches, about SHARD_SAMPLES of them and no more than SHARD_BYTES."""
    most = min(SHARD_SAMPLES, max(1, SHARD_BYTES // size(flow)), settings.n)
    return max(1, most // batch) * batch


def size(flow: Flow) -> int:
    """Bytes of one sample."""
    return math.prod(flow.data_shape) * next(flow.parameters()).element_size()
