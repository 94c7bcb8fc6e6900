"""How well a flow samples the Ising model, beside what is known exactly and by Monte Carlo."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.types import Decoded
from jacobiflow.data.ising import Estimate, Ising, MonteCarlo, parse_target
from jacobiflow.flows.flow import Flow, standard_normal
from jacobiflow_lab.metrics.errors import MetricError


@dataclass(frozen=True, kw_only=True)
class IsingMetrics:
    """Of raw samples of a flow; `reweighted_*` of the same samples by importance weights p / q."""

    energy_per_site: Estimate
    abs_magnetization: Estimate
    effective_sample_size: Estimate  # of weights p / q, (sum w)^2 / (n sum w^2)
    log_z_bound: Estimate  # E[log p - log q] + log Z
    reweighted_energy_per_site: Estimate
    reweighted_abs_magnetization: Estimate
    reweighted_log_z: Estimate
    exact_energy_per_site: float
    exact_log_z: float
    monte_carlo_energy_per_site: Estimate
    monte_carlo_abs_magnetization: Estimate
    samples: int
    not_finite: int  # samples without a finite answer; they are left out, and should be none

    def to_dict(self) -> dict[str, Any]:
        """Plain data: an estimate becomes `name` and `name_error`."""
        doc: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                doc |= {name: value["value"], f"{name}_error": value["error"]}
            else:
                doc[name] = value
        return doc


def target_of(flow: Flow) -> Ising:
    """The Ising model that a flow was trained for."""
    if flow.target is None or flow.target.get("kind") != "ising":
        raise MetricError("metrics ising: this flow was not trained for an Ising model; try ising-16")
    target = parse_target(flow.target)
    if flow.data_shape != (target.sites,):
        raise MetricError(
            f"metrics ising: the flow has samples of shape {flow.data_shape}, not {target.sites}"
        )
    return target


@functools.cache
def reference(target: Ising) -> MonteCarlo:
    """The Monte-Carlo run beside which samples are put; made once a process."""
    return target.monte_carlo()


@torch.no_grad()
def evaluate(
    flow: Flow,
    *,
    samples: int,
    seed: int = 0,
    batch: int = 1000,
    decode: Callable[[Tensor], Decoded] | None = None,
    progress: Callable[[int], object] = lambda done: None,
) -> IsingMetrics:
    """Metrics of `samples` samples, a `batch` at a time; decode: how noise becomes samples."""
    target, decode = target_of(flow), decode or functools.partial(flow.decode, warn=False)
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for start in range(0, samples, batch):
        z = flow.noise(min(batch, samples - start), seed, start=start)
        out = decode(z)
        spins = target.spins(out.x.cpu(), draw)
        # In float64: the difference of two sums of hundreds is wanted to a hundredth.
        log_q = standard_normal(z.double()) - out.log_det.double()
        log_w = target.log_density(out.x.double()) - log_q
        rows.append(torch.stack((log_w.cpu(), target.energy(spins), target.magnetization(spins))))
        progress(len(z))
    found = torch.cat(rows, 1)
    kept = found[:, found.isfinite().all(0)]
    if kept.shape[1] < 2:
        raise MetricError(f"metrics ising: {kept.shape[1]} of {samples} samples are finite, 2 are needed")
    log_w, energy, magnet = kept
    w = (log_w - log_w.max()).exp()
    known = reference(target)
    return IsingMetrics(
        energy_per_site=Estimate.of(energy),
        abs_magnetization=Estimate.of(magnet),
        effective_sample_size=effective_sample_size(w),
        log_z_bound=Estimate.of(log_w),
        reweighted_energy_per_site=reweighted(energy, w),
        reweighted_abs_magnetization=reweighted(magnet, w),
        reweighted_log_z=log_mean(log_w),
        exact_energy_per_site=target.exact_energy(),
        exact_log_z=target.log_z(),
        monte_carlo_energy_per_site=known.energy_per_site,
        monte_carlo_abs_magnetization=known.abs_magnetization,
        samples=samples,
        not_finite=samples - kept.shape[1],
    )


def reweighted(x: Tensor, w: Tensor) -> Estimate:
    """sum w x / sum w, with the error of a ratio of means."""
    mean = (w * x).sum() / w.sum()
    spread = (w * (x - mean)).square().sum().sqrt() / w.sum()
    return Estimate(float(mean), float(spread))


def log_mean(log_w: Tensor) -> Estimate:
    """log of the mean of w, with its first-order error."""
    top = log_w.max()
    w = (log_w - top).exp()
    return Estimate(float(top + w.mean().log()), float(w.std() / w.mean() / len(w) ** 0.5))


def effective_sample_size(w: Tensor) -> Estimate:
    """(sum w)^2 / (n sum w^2), 0 to 1; its error is the spread over ten parts of the samples."""
    size = w.sum().square() / w.square().sum() / len(w)
    parts = torch.stack(
        [p.sum().square() / p.square().sum() / len(p) for p in w.tensor_split(min(10, len(w)))]
    )
    return Estimate(float(size), Estimate.of(parts).error)
