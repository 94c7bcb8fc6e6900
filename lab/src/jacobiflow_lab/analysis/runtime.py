"""Where the seconds of sampling go: each block, and the rest. All plans decode the same noise in turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from jacobiflow.core.method import Method, Plan
from jacobiflow.core.results import Status
from jacobiflow.flows.compare import deviation, plain_tarflow
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.tarflow import TarFlow
from jacobiflow.flows.tune import clock_of
from jacobiflow.kernels.backend import Backend
from jacobiflow_lab.analysis.exact_blocks import Note, select_rows

PLAIN = "plain loop"  # sequential decoding of a TarFlow as in public code


def runtimes(
    flow: Flow,
    n: int,
    plans: Mapping[str, Plan],
    *,
    runs: int = 1,
    repeats: int = 3,
    seed: int = 0,
    denoise: bool | None = None,
    backend: Backend | None = None,
    plain: bool = False,
    progress: Note = lambda text: None,
    **condition: Any,
) -> list[dict[str, Any]]:
    """Sample batches of n by every plan: `runs` runs of `repeats` batches, each with new noise.

    One row of plain data per plan; seconds are means per batch. runs, seconds, spread: of decoding alone, the
    mean of each run, of all, and the largest deviation of a run. whole...: the same with `other`, all that is
    not a block: noise, denoising, communication (gathering the samples of all processes, `gathered` of them),
    and the rest between blocks. layers: seconds and mean sweeps of the blocks in sampling order; shares: of
    the whole, each block and then `other`. largest, mean: the deviation from the first plan.

    denoise: default: flows that were trained with noise. plain: also by the loop of public code, which comes
    first. condition: labels, context, guidance. Of several processes each samples a batch, and all get all
    samples. Noise, denoising and communication do not depend on the plan and are timed once per batch.
    """
    clean = flow.noise_std > 0 if denoise is None else denoise
    device = next(flow.parameters()).device
    for plan in {*plans.values(), Plan((Method(max_sweeps=1),) * len(flow.blocks))}:
        z = flow.noise(1, seed)  # a first sample pays for one-time costs
        first = select_rows(condition, slice(1), n)
        flow.decode(z, plan, backend=backend, on_failure="return", warn=False, **first)
    around: list[dict[str, float]] = []
    decoded: dict[str, list[dict[str, Any]]] = {name: [] for name in ((PLAIN,) if plain else ()) + (*plans,)}
    for i in range(runs * repeats):
        progress(f"batch {i + 1} of {runs * repeats}")
        if _processes() > 1:
            dist.barrier()  # waiting for a late process is not communication
        clock = Clock(device)
        z = flow.noise(n, seed, start=i * n)
        noise = clock.seconds()
        outs = {name: flow.decode(z, p, backend=backend, warn=False, **condition) for name, p in plans.items()}
        exact = next(iter(outs.values())).x
        for name, out in outs.items():
            blocks = [(b.seconds, b.sweeps.double().mean().item()) for b in out.stats.blocks]
            decoded[name].append(
                {"seconds": out.stats.seconds, "blocks": blocks, "status": out.stats.status}
                | {"backend": out.stats.backend}
                | deviation(out.x, exact)
            )
        if plain:
            assert isinstance(flow, TarFlow)
            clock.seconds()
            x = plain_tarflow(flow, z, condition.get("labels"))
            loop = {"seconds": clock.seconds(), "blocks": [], "status": Status.EXACT, "backend": "torch"}
            decoded[PLAIN].append(loop | deviation(x, exact))
        clock.seconds()
        x = flow.denoise(exact, labels=condition.get("labels")) if clean else exact
        denoising = clock.seconds()
        if _processes() > 1:
            dist.all_gather([torch.empty_like(x) for _ in range(_processes())], x.contiguous())
        communication = clock.seconds()
        around.append({"noise": noise, "denoising": denoising, "communication": communication})
    shared: dict[str, Any] = {"batch": n, "repeats": repeats, "gathered": n * _processes()}
    shared |= {"threads": torch.get_num_threads(), "device": str(device)}
    shared |= {key: statistics.fmean(each[key] for each in around) for key in around[0]}
    others = [sum(each.values()) for each in around]
    return [_summary(name, batches, others, runs, shared) for name, batches in decoded.items()]


def _summary(
    name: str, batches: list[dict[str, Any]], others: list[float], runs: int, shared: dict[str, Any]
) -> dict[str, Any]:
    """The row of one plan over all batches."""
    seconds = np.array([each["seconds"] for each in batches])
    blocks = np.array([each["blocks"] for each in batches]).mean(0)
    rest = max(float(seconds.mean() - blocks[:, 0].sum()), 0.0) if len(blocks) else 0.0
    other = sum(shared[key] for key in ("noise", "denoising", "communication")) + rest
    parts = [*(float(block[0]) for block in blocks), other]
    row = shared | {
        "plan": name,
        "backend": batches[0]["backend"],
        "layers": [{"seconds": float(s), "sweeps": float(count)} for s, count in blocks],
        "shares": [part / sum(parts) for part in parts],
        "rest": rest,
        "other": other,
        "largest": max(each["largest"] for each in batches),
        "mean": statistics.fmean(each["mean"] for each in batches),
        "status": max((each["status"] for each in batches), key=lambda status: status.rank).name,
    }
    for prefix, each in (("", seconds), ("whole_", seconds + others)):
        means, mean = each.reshape(runs, -1).mean(1), float(each.mean())
        spread = float(abs(means - mean).max())
        row |= {f"{prefix}runs": means.tolist(), f"{prefix}spread": spread, prefix.strip("_") or "seconds": mean}
    return row


class Clock:
    """Seconds since it was read the last time, with all work of the device done."""

    def __init__(self, device: torch.device) -> None:
        self.read = clock_of(device)
        self.mark = self.read()

    def seconds(self) -> float:
        """Since the last call."""
        before, self.mark = self.mark, self.read()
        return self.mark - before


def _processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
