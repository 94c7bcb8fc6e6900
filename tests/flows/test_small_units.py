"""Data in units of their own: a MAF trained on variables of scale 1e-6, without standardising."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import jacobiflow as jf

SCALE = 1e-6
FEATURES = 32
N = 64


class Times(nn.Module):
    """A weight that is trained in units of its own."""

    def __init__(self, by: Tensor) -> None:
        super().__init__()
        self.by = by

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.by


def data(n: int) -> Tensor:
    """x_t = 0.5 sin(2 x_{t-1}) + 0.4 noise, in units of SCALE. Sweeps converge in fewer than FEATURES."""
    noise = torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(0))
    x = noise.clone()
    for t in range(1, FEATURES):
        x[:, t] = 0.5 * torch.sin(2 * x[:, t - 1]) + 0.4 * noise[:, t]
    return SCALE * x


@pytest.fixture(scope="module")
def trained() -> jf.Flow:
    """Adam takes steps of the size of a weight only if that is about 1, hence the units of weights."""
    torch.manual_seed(0)
    config = jf.MAFConfig(features=FEATURES, blocks=1, hidden=(48,), scale="exp", activation="tanh")
    flow = jf.MAF(config)
    net = flow.blocks[0]
    shift = torch.ones(2 * FEATURES)
    shift[1::2] = SCALE
    units = (
        (net.linears[0], "weight", torch.tensor(1 / SCALE)),
        (net.head, "weight", shift[:, None]),
        (net.head, "bias", shift),
    )
    for layer, name, unit in units:
        parametrize.register_parametrization(layer, name, Times(unit))
    with torch.no_grad():
        net.head.parametrizations.bias.original[::2] = math.log(SCALE)
    x, optimizer = data(1024), torch.optim.Adam(flow.parameters(), lr=0.03)
    for _ in range(100):
        loss = -flow.log_prob(x).mean() / FEATURES
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for layer, name, _ in units:
        parametrize.remove_parametrizations(layer, name)
    entropy = math.log(0.4 * SCALE) + 0.5 * math.log(2 * math.pi * math.e)
    assert loss.item() < entropy + 0.3  # it has learnt the dependence, too
    return flow.requires_grad_(False)


def errors(flow: jf.Flow, out: jf.Decoded, exact: jf.Decoded) -> float:
    """The largest error, in standard deviations of the data."""
    return float(((out.x - exact.x).abs() / data(1024).std(0)).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("init", ["zeros", "previous"])
def test_exact_is_exact(trained: jf.Flow, dtype: torch.dtype, init: str) -> None:
    flow = trained.to(dtype)
    z = flow.noise(N, seed=1)
    exact = flow.decode(z, "sequential", check=True)
    assert exact.stats.status is jf.Status.EXACT
    out = flow.decode(z, "uniform", tol=0.0, init=init, check=True)
    assert out.stats.status is jf.Status.EXACT
    assert errors(flow, out, exact) < 200 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tol_is_in_units_of_the_data(trained: jf.Flow, dtype: torch.dtype) -> None:
    flow = trained.to(dtype)
    z = flow.noise(N, seed=1)
    exact, out = flow.decode(z, "sequential"), flow.decode(z, "uniform", tol=1e-4)
    assert out.stats.status is jf.Status.CONVERGED
    assert 5 < out.stats.blocks[0].sweeps.double().mean() < 0.8 * FEATURES
    assert errors(flow, out, exact) < 1e-3
