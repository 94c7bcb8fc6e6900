"""Ising metrics on flows whose truth is known."""

from __future__ import annotations

import math

import pytest
import torch

import jacobiflow as jf
from jacobiflow_lab.lattice.evaluation import effective_sample_size, evaluate, log_mean, reweighted
from jacobiflow_lab.lattice.ising import Ising
from jacobiflow_lab.lattice.lattice_flow import LatticeConfig, LatticeFlow
from jacobiflow_lab.metrics.metric import MetricError
from subjects import lattice, maf, perturb

TARGET = Ising(side=3, temperature=12.0)


def normal_flow() -> LatticeFlow:
    """A fresh flow with the linear map of the Ising model: its samples are N(0, K)."""
    return LatticeFlow(LatticeConfig(features=9, blocks=1, hidden=(8,), linear=True, temperature=12.0))


def test_a_normal_flow_reweighted_is_exact() -> None:
    """Importance weights turn what the flow gets wrong into the exact values."""
    found = evaluate(normal_flow(), samples=30_000, batch=10_000)
    assert found.exact_log_z == TARGET.log_z()
    assert found.exact_energy_per_site == TARGET.exact_energy()
    raw, again = found.energy_per_site, found.reweighted_energy_per_site
    assert abs(raw.value - TARGET.exact_energy()) > 10 * raw.error
    assert abs(again.value - TARGET.exact_energy()) < 4 * again.error < 0.05
    known, again = found.monte_carlo_abs_magnetization, found.reweighted_abs_magnetization
    assert abs(again.value - known.value) < 4 * math.hypot(again.error, known.error) < 0.05
    assert abs(found.reweighted_log_z.value - TARGET.log_z()) < 4 * found.reweighted_log_z.error < 0.1
    assert found.log_z_bound.value < TARGET.log_z() - 10 * found.log_z_bound.error
    assert 0.1 < found.effective_sample_size.value < 0.9


def test_the_bound_is_that_of_the_densities() -> None:
    """log q is the flow's own log_prob, whatever decoded the samples."""
    flow = perturb(normal_flow(), 0.5)
    found = evaluate(flow, samples=500, batch=64, decode=lambda z: flow.decode(z, "sequential"))
    x = flow.sample(500, seed=0).x
    with torch.no_grad():
        gap = TARGET.log_density(x.double()) - flow.double().log_prob(x.double())
    assert found.log_z_bound.value == pytest.approx(gap.mean().item(), abs=1e-3)
    assert found.log_z_bound.error == pytest.approx(gap.std().item() / 500**0.5, rel=1e-3)


def test_batches_change_nothing() -> None:
    flow, seen = normal_flow(), []
    whole = evaluate(flow, samples=300, seed=3)
    parts = evaluate(flow, samples=300, seed=3, batch=77, progress=seen.append)
    assert seen == [77, 77, 77, 69]
    assert parts.to_dict() == pytest.approx(whole.to_dict(), rel=1e-5)


def test_samples_that_are_not_finite_are_counted_and_left_out() -> None:
    flow = normal_flow()

    def decode(z: torch.Tensor) -> jf.Decoded:
        out = flow.decode(z)
        out.x[::4] = math.nan
        return out

    found = evaluate(flow, samples=100, decode=decode)
    assert (found.samples, found.not_finite) == (100, 25)
    assert math.isfinite(found.log_z_bound.value)


def test_weights() -> None:
    w = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]).double()
    assert effective_sample_size(w).value == 0.5
    assert reweighted(torch.arange(8.0).double(), w).value == 1.5
    assert log_mean(torch.tensor([1000.0, 1000.0])).value == 1000.0


def test_other_flows_are_refused() -> None:
    for flow in (maf(0.0, features=9), lattice(0.0, features=9, reach=1)):
        with pytest.raises(MetricError, match="was not trained for an Ising model"):
            evaluate(flow, samples=10)


def test_the_bundled_flow_is_close_to_the_ising_model() -> None:
    """Raw samples: energy within 5% of exact, the bound within 5 nats of log Z."""
    flow = jf.load("ising-16")
    found = evaluate(flow, samples=1000)
    assert abs(found.energy_per_site.value / found.exact_energy_per_site - 1) < 0.05
    assert 0 < found.exact_log_z - found.log_z_bound.value < 5
    z = flow.noise(64, seed=5)
    exact, swept = flow.decode(z, "sequential"), flow.decode(z, "selective")
    assert (exact.x - swept.x).abs().max() < 1e-3
    assert (exact.log_det - swept.log_det).abs().max() < 1e-2
