"""The same noise decoded by several plans: time, sweeps, and how far from exact."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.core.bijectors import description
from jacobiflow.core.method import Method, Plan
from jacobiflow.core.results import Decoded, Stats, nonfinite_rows
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.tarflow import TarFlow
from jacobiflow.kernels.backend import Backend

PLAIN = "plain loop"  # its name beside those of plans
FEWEST_RUNS, MOST_RUNS = 3, 15  # of each plan
STABLE = 0.1  # relative error of a speed-up that may be printed, with two digits
NOISY = "too noisy"
REST = 0.03  # seconds before a run: torch's threads wait for more work by spinning, for some milliseconds


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan at one batch size, against the same noise by the baseline: the plain loop, else sequential."""

    plan: str
    batch: int
    runs: int
    seconds: float  # median of the runs
    speedup: float
    stable: bool  # whether the runs agree on the speed-up
    sweeps: tuple[float, ...]  # mean over samples, each block, the one next to the noise first
    largest: float  # deviation from sequential decoding, over all numbers of all samples
    mean: float
    status: str  # the worst one
    nonfinite: int = 0  # samples without a finite answer
    backend: str = ""  # what evaluated the blocks

    @property
    def summary(self) -> str:
        """The worst status in plain words."""
        return f"{self.nonfinite:,} " * bool(self.nonfinite) + self.status.lower().replace("_", " ")

    @property
    def gain(self) -> str:
        return f"{self.speedup:.2g}x" if self.stable else NOISY


def agree(base: Sequence[float], times: Sequence[float]) -> bool:
    """Whether alternating runs tell their speed-up within STABLE: by the middle half of their ratios.

    >>> agree([2.0, 2.1, 2.0], [1.0, 1.0, 1.0]), agree([2.0, 2.0, 6.0], [1.0, 4.0, 1.0]), agree([2.0], [1.0])
    (True, False, False)
    """
    if min(len(base), len(times)) < FEWEST_RUNS:
        return False
    low, middle, high = statistics.quantiles([b / t for b, t in zip(base, times, strict=True)], n=4)
    return high - low <= STABLE * middle * math.sqrt(len(times))


def compare(
    flow: Flow,
    z: Tensor,
    plans: Sequence[str],
    batches: Sequence[int],
    *,
    repeats: int = MOST_RUNS,
    budget: float = math.inf,
    backend: Backend | None = None,
    options: Callable[[str], dict[str, Any]] = lambda _: {},
    condition: Callable[[int], dict[str, Any]] = lambda _: {},
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Row], dict[str, Decoded]]:
    """Rows for every plan and batch size, and the samples of the largest batch.

    plans: names, plan files, and PLAIN for a TarFlow without guidance, which is then the baseline. Runs alternate
    between plans until all speed-ups are stable, at most `repeats` times, and after `budget` seconds only to reach
    FEWEST_RUNS. `options` gives decode's options of a plan, `condition` the labels or context of a batch.
    """
    names = list(dict.fromkeys([*(p for p in plans if p == PLAIN), "sequential", *plans]))
    sweep = Plan((Method(max_sweeps=1),) * len(flow.blocks))  # pays for what a flow makes at its first use
    flow.decode(z[:1], sweep, **condition(1), on_failure="return", backend=backend, warn=False)
    rows, outs = list[Row](), dict[str, Decoded]()
    sizes, start = sorted(set(batches)), perf_counter()
    for i, batch in enumerate(sizes):
        seconds: dict[str, list[float]] = {name: [] for name in names}
        outs, run, most, began = {}, 0, repeats, perf_counter()
        left = start + budget * (i + 1) / len(sizes) - began
        while run < most:
            for name in reversed(names) if run % 2 else names:  # so that each follows two others
                progress(f"batch {batch}, run {run + 1} of at most {most}: {name}")
                sleep(REST)
                outs[name] = _decode(flow, z[:batch], name, backend=backend, **options(name), **condition(batch))
                seconds[name].append(outs[name].stats.seconds)
            if all(agree(seconds[names[0]], seconds[name]) for name in names):
                break
            run += 1
            fit = left * run / max(perf_counter() - began, 1e-9)
            most = min(repeats, max(FEWEST_RUNS, run, math.floor(min(fit, repeats))))
        rows += [_row(name, outs, seconds, seconds[names[0]]) for name in names if name in plans]
    return rows, outs


def _decode(flow: Flow, z: Tensor, name: str, **options: Any) -> Decoded:
    if name != PLAIN:
        return flow.decode(z, name, warn=False, **options)
    began = perf_counter()
    x = plain_tarflow(flow, z, options.get("labels"))
    x.sum().item()  # waits for the device
    seconds, unknown = perf_counter() - began, x.new_full((len(x),), math.nan)
    return Decoded(x=x, log_det=unknown, stats=Stats(blocks=(), seconds=seconds))


def deviation(x: Tensor, exact: Tensor) -> dict[str, float]:
    """The largest and mean |x - exact| over finite numbers."""
    off = (x - exact).abs().double()[(x - exact).isfinite()]
    return {"largest": off.max().item() if len(off) else math.nan, "mean": off.mean().item()}


def _row(name: str, outs: dict[str, Decoded], seconds: dict[str, list[float]], base: Sequence[float]) -> Row:
    out, time = outs[name], statistics.median(seconds[name])
    return Row(
        plan=name,
        batch=len(out.x),
        runs=len(seconds[name]),
        seconds=time,
        speedup=statistics.median(base) / time,
        stable=agree(base, seconds[name]),
        sweeps=tuple(b.sweeps.double().mean().item() for b in out.stats.blocks),
        **deviation(out.x, outs["sequential"].x),
        status=out.stats.status.name,
        nonfinite=int(nonfinite_rows(out.x).sum()),
        backend=out.stats.backend or "torch",
    )


def has_plain_loop(flow: Flow, guidance: Guidance) -> bool:
    """Whether `plain_tarflow` decodes this flow."""
    return type(flow) is TarFlow and not flow.config.volume_preserving and not guidance.weight


@torch.inference_mode()
def plain_tarflow(flow: Flow, z: Tensor, labels: Tensor | None = None) -> Tensor:
    """Sequential decoding as public code has it, with torch's attention: keys and values are concatenated."""
    if description(flow.bind(0, len(z), None, Guidance())[0]) is None:
        raise ValueError("the plain loop knows the standard transformer of TarFlow only: compare with 'sequential'")
    labels = None if labels is None else labels.to(z.device)
    x = z * flow.get_buffer("var").sqrt()
    for k, block in reversed(list(enumerate(flow.blocks))):
        x = _plain_block(block, x.flip(1), labels).flip(1) if k % 2 else _plain_block(block, x, labels)
    return flow.from_sequence(x)


def _plain_block(block: Any, z: Tensor, labels: Tensor | None) -> Tensor:
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if i in kept:
            k, v = (torch.cat(pair, dim=2) for pair in zip(kept[i], (k, v), strict=True))
        kept[i] = k, v
        return F.scaled_dot_product_attention(q, k, v)

    x, condition = z.clone(), block.condition(labels)
    for t in range(z.shape[1] - 1):
        h = block.proj_in(x[:, t : t + 1]) + block.pos_embed[t : t + 1]
        h = h if condition is None else h + condition
        theta = block.proj_out(block.net(h, attend))
        x[:, t + 1 : t + 2], _ = block.bijector.inverse(z[:, t + 1 : t + 2], theta)
    return x
