"""The same noise decoded by several plans: time, sweeps, and how far from exact."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jacobiflow.core.method import Method, Plan
from jacobiflow.core.results import Decoded, nonfinite_rows
from jacobiflow.flows.flow import Flow
from jacobiflow.kernels.backend import Backend


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
    nonfinite: int = 0  # samples without a finite answer
    backend: str = ""  # what evaluated the blocks

    @property
    def summary(self) -> str:
        """The worst status in plain words, with the number of samples if they are not finite."""
        count = f"{self.nonfinite:,} " if self.nonfinite else ""
        return count + self.status.lower().replace("_", " ")


def compare(
    flow: Flow,
    z: Tensor,
    plans: Sequence[str],
    batches: Sequence[int],
    *,
    repeats: int = 3,
    backend: Backend | None = None,
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
    flow.decode(z[:1], sweep, **condition(1), on_failure="return", backend=backend, warn=False)
    rows: list[Row] = []
    outs: dict[str, Decoded] = {}
    for batch in sorted(set(batches)):
        part = z[:batch]
        outs = {}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                progress(f"batch {batch}: {name}")
                given = options(name) | condition(batch)
                outs[name] = flow.decode(part, name, backend=backend, warn=False, **given)
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
                    nonfinite=int(nonfinite_rows(out.x).sum()),
                    backend=out.stats.backend,
                )
            )
    return [r for r in rows if r.plan in plans], outs
