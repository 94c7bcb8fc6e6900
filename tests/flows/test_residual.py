"""check=True: what the residual says about samples that ended EXACT."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import jacobiflow as jf
from jacobiflow.flows.residual import checked

E, C = jf.Status.EXACT, jf.Status.CONVERGED


def cancelling(dtype: torch.dtype) -> jf.MAF:
    """x_1 = z_1 + 1e8 relu(x_0): where x_0 is positive, float32 forgets z_1."""
    flow = jf.MAF(jf.MAFConfig(features=2, blocks=1, hidden=(1,), scale="exp"))
    net = flow.blocks[0]
    with torch.no_grad():
        for p in net.parameters():
            p.zero_()
        net.linears[0].weight[0, 0] = 1.0
        net.head.weight[3, 0] = 1e8
    return flow.to(dtype).requires_grad_(False)


@pytest.mark.parametrize("plan", ["sequential", "uniform"])
def test_a_large_residual_is_not_exact(plan: str) -> None:
    flow = cancelling(torch.float32)
    z = torch.tensor([[-1.0, 0.3], [1.0, 0.3], [2.0, 0.3]])
    options = {} if plan == "sequential" else {"tol": 0.0}
    assert flow.decode(z, plan, **options).stats.status is E
    with pytest.warns(RuntimeWarning, match=r"2 of 3 samples .* up to 3\.0e-01 .* float64") as caught:
        out = flow.decode(z, plan, check=True, **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert out.stats.blocks[0].status == (E, C, C)
    assert out.stats.status is C
    torch.testing.assert_close(out.stats.residual, torch.tensor([0.0, 0.3, 0.3]))


def test_float64_keeps_it() -> None:
    flow = cancelling(torch.float64)
    out = flow.decode(
        torch.tensor([[1.0, 0.3]], dtype=torch.float64), "sequential", check=True
    )  # a warning is an error
    assert out.stats.status is E
    assert 0 < out.stats.residual.item() < 1e-7


def stats(*status: jf.Status) -> jf.BlockStats:
    none = torch.zeros(len(status))
    return jf.BlockStats(sweeps=none, evaluated=none, update=none, status=status, seconds=0.0)


def test_the_bound_is_in_units_of_z() -> None:
    bound = math.sqrt(torch.finfo(torch.float64).eps)
    z = torch.tensor([[0.0, 0.0], [0.0, 0.0], [100.0, 0.0], [100.0, 0.0], [0.0, 0.0]], dtype=torch.float64)
    off = torch.tensor([[0, 0.9], [0, 1.1], [90, 0], [0, 90], [0, math.nan]], dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="3 of 5"):
        found, residual = checked([stats(E, E, E, E, E)], z, z + bound * off)
    assert found[0].status == (E, C, E, C, C)
    assert residual[1].item() == pytest.approx(1.1 * bound)
    assert residual[2].item() == pytest.approx(90 * bound)


def test_only_samples_that_ended_exact_change() -> None:
    blocks = [stats(*jf.Status), stats(E, E, E, E, E)]
    z = torch.zeros(5, 3)
    with pytest.warns(RuntimeWarning, match="1 of 5"):
        found, _ = checked(blocks, z, z + 1)
    assert found[0].status == (C, *tuple(jf.Status)[1:])
    assert found[1].status == (C, E, E, E, E)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checked([stats(C, C)], z[:2], z[:2] + 1)[0][0].status == (C, C)
