"""The most memory that decoding takes, plan by plan, each in a process of its own.

On CUDA it is what torch's allocator had given out at most. On a CPU nobody counts for us, so it is the
growth of the process' resident memory from just before decoding to its highest point during it, as the kernel
keeps it; code, weights and what a flow makes at its first use are there before and are told apart.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jacobiflow.core.plan import Plan
from jacobiflow.core.types import JacobiflowError
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.layers import plain

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class MemoryTrialError(JacobiflowError, RuntimeError):
    """A measurement whose process failed."""


@dataclass(frozen=True, kw_only=True)
class Peak:
    """One plan; bytes."""

    plan: str
    cache: bool  # whether what settled positions cost was kept
    peak: int  # the most that decoding took beyond `base`
    base: int  # held before: on CUDA weights, on a CPU all of the process
    measure: str  # what was counted


@dataclass(frozen=True, kw_only=True)
class Memory:
    """All plans, at one batch size."""

    batch: int
    peaks: tuple[Peak, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return plain(self)


def memory(
    source: str | Path | Flow,
    trials: Sequence[tuple[str | Path | Plan, bool]] = (
        ("sequential", True),
        ("uniform", False),
        ("selective", True),
        ("selective", False),
    ),
    *,
    n: int = 16,
    labels: Sequence[int] | None = None,
    tol: float | None = None,
    seed: int = 0,
    device: str = "cpu",
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Memory:
    """Peak memory of decoding n samples with each plan, with or without a cache.

    source: a bundled name, a checkpoint folder, a hub id, or a flow, which is then written to a temporary
    folder: every trial is a fresh process. labels: one a sample, or None.
    """
    found = []
    with tempfile.TemporaryDirectory() as room:
        if isinstance(source, Flow):
            source.save(Path(room) / "flow")
            source = Path(room) / "flow"
        for i, (plan, cache) in enumerate(trials):
            name = plan if isinstance(plan, str) else "plan" if isinstance(plan, Plan) else plan.stem
            progress(f"{name}, {'with' if cache else 'without'} a cache")
            if isinstance(plan, Plan):
                plan.save(path := Path(room) / f"plan-{i}.json")
                plan = path
            order = {
                "source": str(source),
                "plan": str(plan),
                "cache": cache,
                "n": n,
                "labels": None if labels is None else list(labels),
                "tol": tol if plan in ("uniform", "selective") else None,
                "seed": seed,
                "device": str(device),
                "threads": threads or torch.get_num_threads(),
            }
            found.append(Peak(plan=name, cache=cache, **_ask(order)))
    return Memory(batch=n, peaks=tuple(found))


def _ask(order: dict[str, Any]) -> dict[str, Any]:
    """The measurement in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "jacobiflow_lab.analysis.memory", json.dumps(order)],
        capture_output=True,
        text=True,
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed goes back, and is not counted
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise MemoryTrialError(f"measuring memory of plan {order['plan']} failed: {last}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def trial(order: dict[str, Any]) -> dict[str, Any]:
    """One measurement, in this process."""
    torch.set_num_threads(order["threads"])
    flow = load(order["source"], device=order["device"]).requires_grad_(False)
    plan = flow.plan(order["plan"], tol=order["tol"], n=order["n"])
    z = flow.noise(order["n"], order["seed"])
    labels = None if order["labels"] is None else torch.tensor(order["labels"], device=z.device)
    few = None if labels is None else labels[:1]
    flow.decode(z[:1], plan, labels=few, cache=order["cache"])  # pays for what is made at the first use

    def run() -> None:
        flow.decode(z, plan, labels=labels, cache=order["cache"])

    if z.device.type == "cuda":
        torch.cuda.synchronize(z.device)
        torch.cuda.reset_peak_memory_stats(z.device)
        base = torch.cuda.memory_allocated(z.device)
        run()
        peak, measure = torch.cuda.max_memory_allocated(z.device), "allocated by torch on CUDA"
    else:
        base, reset = _settle()
        run()
        peak, measure = _highest(), "resident memory of the process"
        if not reset:
            measure += ", above its earlier peak"
    return {"peak": max(peak - base, 0), "base": base, "measure": measure}


def _settle() -> tuple[int, bool]:
    """What the process holds now, and whether its peak has been brought down to that."""
    gc.collect()
    with suppress(OSError, AttributeError):  # glibc's own
        ctypes.CDLL(None).malloc_trim(0)
    try:
        CLEAR.write_text("5")
        return _status("VmRSS"), True
    except (OSError, ValueError, KeyError):  # not Linux, or not allowed
        return _highest(), False


def _highest() -> int:
    """The most that the process has held since its peak was last reset."""
    try:
        return _status("VmHWM")
    except (OSError, ValueError, KeyError):
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _status(name: str) -> int:
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines() if ":" in line)
    return 1024 * int(lines[name].split()[0])


if __name__ == "__main__":
    print(json.dumps(trial(json.loads(sys.argv[1]))))
