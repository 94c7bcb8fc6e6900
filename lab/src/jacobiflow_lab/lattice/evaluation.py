"""How well a flow samples the Ising model, beside exact and Monte-Carlo values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.results import Decoded
from jacobiflow.flows.flow import Flow, standard_normal
from jacobiflow_lab.lattice.ising import Estimate, Ising, MonteCarlo
from jacobiflow_lab.lattice.lattice_flow import LatticeFlow
from jacobiflow_lab.metrics.metric import MetricError


@dataclass(frozen=True, kw_only=True)
class IsingMetrics:
    """Estimates from raw samples of a flow; `reweighted_*` weighs the same samples by p / q."""

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
    not_finite: int  # samples without a finite answer, which are left out; normally 0

    def to_dict(self) -> dict[str, Any]:
        """Plain data: an estimate becomes `name` and `name_error`."""
        doc: dict[str, Any] = {}
        for name, value in asdict(self).items():
            if isinstance(value, dict):
                doc |= {name: value["value"], f"{name}_error": value["error"]}
            else:
                doc[name] = value
        return doc


def ising_of(flow: Flow) -> Ising:
    """The Ising model that a flow was trained for."""
    if not isinstance(flow, LatticeFlow) or not flow.config.temperature:
        raise MetricError("metrics ising: this flow was not trained for an Ising model; try ising-16")
    return flow.config.ising()


@functools.cache
def reference(ising: Ising) -> MonteCarlo:
    """The Monte-Carlo run that samples are compared with; made once per process."""
    return ising.monte_carlo()


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
    """Metrics of `samples` samples, `batch` at a time. decode: turns noise into samples."""
    ising, decode = ising_of(flow), decode or functools.partial(flow.decode, warn=False)
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for start in range(0, samples, batch):
        z = flow.noise(min(batch, samples - start), seed, start=start)
        out = decode(z)
        spins = ising.spins(out.x.cpu(), draw)
        # float64: a difference of two sums of hundreds is needed to a hundredth.
        log_q = standard_normal(z.double()) - out.log_det.double()
        log_w = ising.log_density(out.x.double()) - log_q
        rows.append(torch.stack((log_w.cpu(), ising.energy(spins), ising.magnetization(spins))))
        progress(len(z))
    found = torch.cat(rows, 1)
    kept = found[:, found.isfinite().all(0)]
    if kept.shape[1] < 2:
        raise MetricError(f"metrics ising: {kept.shape[1]} of {samples} samples are finite, 2 are needed")
    log_w, energy, magnet = kept
    w = (log_w - log_w.max()).exp()
    known = reference(ising)
    return IsingMetrics(
        energy_per_site=Estimate.of(energy),
        abs_magnetization=Estimate.of(magnet),
        effective_sample_size=effective_sample_size(w),
        log_z_bound=Estimate.of(log_w),
        reweighted_energy_per_site=reweighted(energy, w),
        reweighted_abs_magnetization=reweighted(magnet, w),
        reweighted_log_z=log_mean(log_w),
        exact_energy_per_site=ising.exact_energy(),
        exact_log_z=ising.log_z(),
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

    def share(w: Tensor) -> Tensor:
        return w.sum().square() / w.square().sum() / len(w)

    parts = torch.stack([share(part) for part in w.tensor_split(min(10, len(w)))])
    return Estimate(float(share(w)), Estimate.of(parts).error)
