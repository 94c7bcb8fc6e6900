"""How many sweeps each layer takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.core.types import Init
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.layers import part, plain

TRAINED = 10  # sweeps that the first block of a trained flow needs, or more


@dataclass(frozen=True, kw_only=True)
class LayerSweeps:
    """One layer; sequential decoding counts T - 1, the first position is given."""

    width: int | None  # of its windows; 1 is sequential, None the whole sequence
    mean: float  # over samples
    batch_max: float  # mean over batches of the slowest sample's: what a test over the whole batch would need
    largest: int
    bound: int  # T - 1: never more in one window over the sequence


@dataclass(frozen=True, kw_only=True)
class Sweeps:
    """The layers, the one next to the noise first."""

    plan: str
    tol: float | None  # of the swept layers, if it is one
    init: Init | None
    samples: int
    batch: int
    layers: tuple[LayerSweeps, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return plain(self)


def sweeps(
    flow: Flow,
    z: Tensor,
    plan: str | Plan = "selective",
    *,
    tol: float | None = None,
    init: Init | None = None,
    batch: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    **condition: Any,
) -> Sweeps:
    """Sweeps of each layer over all samples, decoded `batch` at a time (None: all at once).

    tol, init: of named plans, as `Flow.decode` takes them. condition: labels, context, guidance.
    """
    chosen = flow.plan(plan, tol=tol, init=init, n=batch or len(z))
    size = batch or len(z)
    counts = []  # of each batch: [layers, n]
    for i in range(0, len(z), size):
        progress(f"samples {i} to {min(i + size, len(z)) - 1}")
        rows = slice(i, i + size)
        out = flow.decode(z[rows], chosen, **part(condition, rows, len(z)))
        counts.append(torch.stack([b.sweeps for b in out.stats.blocks]).double())
    every = torch.cat(counts, 1)
    slowest = torch.stack([c.amax(1) for c in counts], 1)
    swept = {(m.tol, m.init) for m in chosen if m.width != 1}
    one = swept.pop() if len(swept) == 1 else (None, None)
    return Sweeps(
        plan=plan if isinstance(plan, str) else "plan",
        tol=one[0],
        init=one[1],
        samples=len(z),
        batch=size,
        layers=tuple(
            LayerSweeps(
                width=method.width,
                mean=float(own.mean()),
                batch_max=float(most.mean()),
                largest=int(own.max()),
                bound=block.length - 1,
            )
            for method, own, most, block in zip(
                chosen, every, slowest, flow.bound_blocks(1, **part(condition, slice(1), len(z))), strict=True
            )
        ),
    )


def doubt(found: Sweeps) -> str | None:
    """What to say of a flow that looks untrained: its first block, swept, needs too few sweeps."""
    first = found.layers[0]
    if first.width == 1 or first.bound < TRAINED or first.mean >= TRAINED:
        return None
    return (
        f"the first block needs only {first.mean:.1f} sweeps of at most {first.bound}: this looks like an "
        f"untrained checkpoint (under {TRAINED}), and its figures are not about trained flows"
    )
