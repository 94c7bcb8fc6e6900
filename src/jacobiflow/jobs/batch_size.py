"""The batch and shard sizes that memory allows."""

from __future__ import annotations

import math
import resource
import sys

import torch

from jacobiflow.core.hardware import BILLION, available_memory, out_of_memory, used_memory
from jacobiflow.core.method import Method, Plan
from jacobiflow.flows.flow import Flow
from jacobiflow.jobs.manifest import JobError
from jacobiflow.jobs.sampling import Settings

MAX_BATCH = 256  # larger batches gain little on any device, and wait longer for their slowest sample
PROBE_SAMPLES = 4  # samples that memory is measured with
MEMORY_SHARE = 0.4  # of the free memory, for one batch: rows that stop are copied out of it
SHARD_BYTES = 64 * 2**20
SHARD_SAMPLES = 1024


def find_batch(flow: Flow, settings: Settings, near: int) -> int:
    """The largest power of two, up to MAX_BATCH, whose decoding fits into the memory that is free now.

    near: how many processes share this machine's memory.
    """
    device = next(flow.parameters()).device
    count = min(PROBE_SAMPLES, settings.n)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory() / near
    if settings.max_memory and device.type == "cpu":
        free = min(free, settings.max_memory * BILLION - used_memory())
    try:
        need = _measure(flow, settings, count)
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        raise JobError(f"not even {count} samples fit into memory ({free / 1e9:.1f} GB are free)") from None
    fits = MEMORY_SHARE * free / max(need / count, 1.0)
    if fits < 1:
        raise JobError(
            f"a sample needs {need / count / 1e9:.1f} GB of memory to decode and {free / 1e9:.1f} GB "
            "are free: use a larger machine, raise --max-memory, or set --batch"
        )
    return int(2 ** math.floor(math.log2(min(fits, MAX_BATCH))))


def _measure(flow: Flow, settings: Settings, count: int) -> int:
    """Bytes that one sweep over whole sequences of `count` samples takes, with gradients if it denoises."""
    device = next(flow.parameters()).device
    sweep = Plan((Method(max_sweeps=1),) * len(flow.blocks))

    def once(n: int) -> None:
        options = settings.decode_options(0, n)
        x = flow.decode(flow.noise(n, 0), sweep, on_failure="return", warn=False, **options).x
        if settings.denoise:
            flow.denoise(x, labels=options["labels"])

    once(1)  # what a flow makes at its first use is not counted
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once(count)
        return torch.cuda.max_memory_allocated(device) - before
    before = _peak()
    once(count)
    return _peak() - before


def _peak() -> int:
    """The most memory in bytes that this process ever held."""
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def find_shard(flow: Flow, settings: Settings, batch: int) -> int:
    """Samples per shard: whole batches, about SHARD_SAMPLES and at most SHARD_BYTES."""
    most = min(SHARD_SAMPLES, max(1, SHARD_BYTES // sample_bytes(flow)), settings.n)
    return max(1, most // batch) * batch


def sample_bytes(flow: Flow) -> int:
    """Bytes of one sample."""
    return math.prod(flow.data_shape) * next(flow.parameters()).element_size()
