"""Peak memory of decoding, plan by plan, each in a process of its own.

On CUDA it is the peak of torch's allocator. On a CPU it is how much the resident memory of the process grows
from just before decoding to its peak, as the operating system counts it. Code, weights and what a flow makes
at its first use are not part of it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from jacobiflow.core.decode import decode
from jacobiflow.core.hardware import peak_memory
from jacobiflow.core.results import JacobiflowError
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.plans import SWEPT
from jacobiflow_lab.analysis.exact_blocks import Record

Cache = Literal["all", "first", "none"]  # the blocks that keep keys and values, or the like
TRIALS: tuple[tuple[str, Cache], ...] = (
    ("sequential", "all"),
    ("uniform", "none"),
    ("selective", "first"),  # the paper's arrangement
    ("selective", "all"),  # our default
    ("selective", "none"),
)


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One plan; bytes."""

    plan: str
    cache: Cache
    peak: int  # the most that decoding took beyond `base`
    base: int  # held before: on CUDA the weights, on a CPU the whole process
    measure: str  # what was counted


@dataclass(frozen=True, kw_only=True)
class Memory(Record):
    """All plans, at one batch size."""

    batch: int
    peaks: tuple[Peak, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON, the peaks also in MiB."""
        doc = super().to_dict()
        for peak in doc["peaks"]:
            peak["mib"] = peak["peak"] / 2**20
        return doc


def memory(
    flow: Flow,
    trials: Sequence[tuple[str, Cache]] = TRIALS,
    *,
    n: int = 16,
    labels: Sequence[int] | None = None,
    tol: float | None = None,
    seed: int = 0,
) -> Memory:
    """Peak memory of decoding n samples with each plan, a name or a file, on the device of the flow.

    The cache is that of all blocks, of the first or of none. labels: one per sample, or None. The flow is
    written to a temporary folder, because every trial is a fresh process.
    """
    peaks = []
    shared = {"n": n, "labels": labels, "seed": seed, "device": str(next(flow.parameters()).device)}
    with tempfile.TemporaryDirectory() as folder:
        flow.save(folder)
        for plan, cache in trials:
            own = {"source": folder, "plan": plan, "cache": cache, "tol": tol if plan in SWEPT else None}
            measured = _in_fresh_process(threads=torch.get_num_threads(), **own, **shared)
            peaks.append(Peak(plan=Path(plan).stem, cache=cache, **measured))
    return Memory(batch=n, peaks=tuple(peaks))


def _in_fresh_process(**options: Any) -> dict[str, Any]:
    """`trial` with these options in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "jacobiflow_lab.analysis.memory", json.dumps(options)],
        capture_output=True,
        text=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # freed memory is returned and not counted
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise JacobiflowError(f"measuring memory of plan {options['plan']} failed: {last}")
    measured: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return measured


def trial(
    *,
    source: str,
    plan: str,
    cache: Cache,
    n: int,
    labels: Sequence[int] | None,
    tol: float | None,
    seed: int,
    device: str,
    threads: int,
) -> dict[str, Any]:
    """One measurement, in this process."""
    torch.set_num_threads(threads)
    flow = load(source, device=device).requires_grad_(False)
    z = flow.noise(n, seed)
    chosen = flow.plan(plan, tol=tol, n=n).resolved(flow.default_unit, calibrated=flow.guesses() is not None)

    def run(n: int) -> None:
        given = None if labels is None else torch.tensor(labels[:n], device=z.device)
        with torch.inference_mode():
            seq = flow.to_prior(z[:n])
            for i, (block, method) in enumerate(zip(flow.bound_blocks(n, labels=given), chosen, strict=True)):
                seq = decode(block, seq, method, cache=cache == "all" or (cache, i) == ("first", 0)).x
            flow.from_sequence(seq)

    run(1)  # pays for what is made at the first use
    if z.device.type == "cuda":
        torch.cuda.synchronize(z.device)
        torch.cuda.reset_peak_memory_stats(z.device)
        base, measure = torch.cuda.memory_allocated(z.device), "allocated by torch on CUDA"
        run(n)
        peak = torch.cuda.max_memory_allocated(z.device)
    else:
        measure = "resident memory of the process" + ("" if _reset_peak() else ", above its earlier peak")
        base = peak_memory()
        run(n)
        peak = peak_memory()
    return {"peak": max(peak - base, 0), "base": base, "measure": measure}


def _reset_peak() -> bool:
    """Free what can be freed. Returns whether the peak could be reset to what the process holds now."""
    gc.collect()
    with suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
    try:
        return bool(Path("/proc/self/clear_refs").write_text("5"))
    except OSError:  # not Linux, or not allowed
        return False


if __name__ == "__main__":
    print(json.dumps(trial(**json.loads(sys.argv[1]))))
