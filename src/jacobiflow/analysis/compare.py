"""The same noise decoded by several plans: time, sweeps, and how far from exact."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.decode import iterates, sequential
from jacobiflow.core.plan import Plan
from jacobiflow.core.types import Decoded, Method
from jacobiflow.flows.flow import Flow


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan at one batch size, against sequential decoding of the same noise."""

    plan: str
    batch: int
    seconds: float  # median of the runs
    speedup: float
    sweeps: tuple[float, ...]  # mean over samples, each block, the one next to the noise first
    largest: float  # deviation from sequential decoding, over all numbers of all samples
    mean: float
    status: str  # the worst one


def compare(
    flow: Flow,
    z: Tensor,
    plans: Sequence[str],
    batches: Sequence[int],
    *,
    repeats: int = 3,
    options: Callable[[str], dict[str, Any]] = lambda _: {},
    condition: Callable[[int], dict[str, Any]] = lambda _: {},
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Row], dict[str, Decoded]]:
    """Rows for every plan and batch size, and the samples of the largest batch.

    Runs alternate between plans, so that a busy moment of the machine hits all of them; one sweep
    beforehand pays for what a flow makes at its first use. `options` gives decode's options of a
    plan, `condition` the labels or context of a batch of that size.
    """
    names = list(dict.fromkeys(["sequential", *plans]))
    sweep = Plan((Method(max_sweeps=1),) * len(flow.blocks))
    flow.decode(z[:1], sweep, **condition(1), on_failure="return")
    rows: list[Row] = []
    outs: dict[str, Decoded] = {}
    for batch in sorted(set(batches)):
        part = z[:batch]
        outs = {}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                progress(f"batch {batch}: {name}")
                outs[name] = flow.decode(part, name, **options(name), **condition(batch))
                seconds[name].append(outs[name].stats.seconds)
        exact, base = outs["sequential"].x, statistics.median(seconds["sequential"])
        for name in names:
            out, time = outs[name], statistics.median(seconds[name])
            off = (out.x - exact).abs().double()
            off = off[off.isfinite()]  # `status` tells of samples that have no finite answer
            rows.append(
                Row(
                    plan=name,
                    batch=batch,
                    seconds=time,
                    speedup=base / time,
                    sweeps=tuple(b.sweeps.double().mean().item() for b in out.stats.blocks),
                    largest=off.max().item() if len(off) else float("nan"),
                    mean=off.mean().item(),
                    status=out.stats.status.name,
                )
            )
    return [r for r in rows if r.plan in plans], outs


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """How one block's answer is approached, step by step: |x - exact| (l2, mean over samples)."""

    jacobi: tuple[float, ...]  # after 0, 1, 2, ... sweeps over the whole sequence
    sequential: tuple[float, ...]  # after 0, 1, 2, ... positions; the rest stands at the block's input


def convergence(flow: Flow, z: Tensor, *, floor: float = 1e-5, **condition: Any) -> tuple[Convergence, ...]:
    """The approach in each block, given the exact input.

    Sweeps stop when the distance is below `floor` times the size of the answer: float32 cannot tell
    what lies much below.
    """
    found = []
    seq = flow.to_prior(z)
    for block, order in flow.bound_blocks(len(z), **condition):
        seq = seq if order is None else seq[:, order]
        exact = sequential(block, seq).x

        def distance(x: Tensor, exact: Tensor = exact) -> float:
            return float(torch.linalg.vector_norm((x - exact).flatten(1), dim=1).nanmean())

        jacobi: list[float] = []
        end = floor * distance(torch.zeros_like(exact))
        for x in iterates(block, seq):
            jacobi.append(distance(x))
            if jacobi[-1] < end:
                break
        mixed, steps = seq.clone(), []
        for t in range(block.length):
            mixed[:, t] = exact[:, t]
            steps.append(distance(mixed))
        found.append(Convergence(jacobi=tuple(jacobi), sequential=tuple(steps)))
        seq = exact if order is None else exact[:, torch.argsort(order)]
    return tuple(found)
