"""check=True: what the residual says about samples that ended EXACT."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import jacobiflow as jf
from jacobiflow.flows.calibration import calibrate
from jacobiflow.flows.checks import checked
from jacobiflow.flows.plans import MARGIN, Choice, pick
from jacobiflow.flows.profile import Entry, measure_profile
from subjects import tarflow

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


def test_a_loose_tol_by_hand_is_told_once_per_setting() -> None:
    flow = tarflow(0.3, num_classes=3, blocks=3).float().eval()
    z, exact = flow.noise(8, seed=0), flow.sample(8, seed=0, plan="sequential").x
    loose, tight = 4.0, 1e-3
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = flow.sample(8, seed=0, tol=loose, batch_size=4)
        flow.decode(z, "selective", tol=loose)  # the same setting
        flow.decode(z, tol=tight)
        flow.decode(z, "selective")  # the paper's tol, not given by hand
        flow.decode(z, flow.plan(tol=loose))
        assert len(caught) == 1
        flow.decode(z, "uniform", tol=loose)  # another one
    assert len(caught) == 2
    assert first.stats.status is C
    assert (first.x - exact).abs().max() > 0.5  # what the warning is about
    residual = flow.decode(z[:4], tol=loose, check=True, warn=False).stats.residual
    text = f"tol 4 is loose for this flow, |encode(x) - z| reaches {residual.max():.2g} in 4 samples: lower tol"
    assert str(caught[0].message).startswith(text)
    assert caught[0].filename == __file__


def test_batches_of_less_than_what_is_looked_at() -> None:
    flow, z = tarflow(0.3, num_classes=3).float().eval(), {"seed": 0, "labels": [0, 1, 2, 0, 1]}
    with pytest.warns(RuntimeWarning, match="tol 4 is loose .* in 2 samples"):
        small = flow.sample(5, tol=4.0, batch_size=2, **z)
    torch.testing.assert_close(small.x, flow.sample(5, tol=4.0, **z).x)


EXACTLY = Choice(jf.Method(width=1, unit="absolute"), 10.0, 0.0)


def freshly_trained() -> jf.Flow:
    """A flow after 60 steps on smooth blobs: labels and details are not learned yet, sweeps go astray."""
    torch.manual_seed(0)
    flow = tarflow(0.2, num_classes=3, blocks=3).float()
    optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)
    place = torch.linspace(-1, 1, 8)
    for _ in range(60):
        centre, labels = torch.rand(32, 2, 1, 1) - 0.5, torch.randint(3, (32,))
        far = (place - centre[:, :1]).square() + (place[:, None] - centre[:, 1:]).square()
        x = 2 * torch.exp(-far * (2 + 4 * labels[:, None, None, None])) - 1
        optimizer.zero_grad()
        flow.training_loss(x + 0.1 * torch.randn_like(x), labels, 0.0)[0].backward()
        optimizer.step()
    return flow.eval().requires_grad_(False)


def hastiest(entry: Entry, bound: float) -> jf.Plan:
    """What auto takes if sweeps cost nothing."""
    rows = [[*(Choice(c.method, 0.1, c.deviation) for c in cells), EXACTLY] for cells in entry.blocks]
    return pick(rows, MARGIN * bound)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist-small", "cifar10-cpu"])
def test_auto_keeps_the_bound_of_bundled_models(name: str) -> None:
    """On noises that the profile has not seen, and wherever sweeps are cheaper than here."""
    flow = jf.load(name)
    assert flow.profile is not None
    plan = hastiest(flow.profile.entries[0], flow.default_deviation)
    assert all(method.width != 1 for method in plan)
    z, labels = flow.noise(64, seed=11), torch.arange(64) % 10
    x, exact = (flow.decode(z, how, labels=labels).x for how in (plan, "sequential"))
    assert 0 < (x - exact).abs().max() <= flow.default_deviation


def test_auto_calls_no_visibly_wrong_image_converged() -> None:
    """Even if sweeps cost nothing, so that auto takes as many as the bound allows."""
    flow = freshly_trained()
    z = flow.noise(128, seed=5)
    exact = flow.decode(z, "sequential").x
    hasty = flow.decode(z, "uniform")
    assert hasty.stats.status is C
    assert (hasty.x - exact).abs().max() > 2 * flow.default_deviation  # visibly wrong: this flow is hard
    calibrate(flow, noises=64)
    entry = measure_profile(flow, noises=32)
    assert entry is not None
    for bound in (flow.default_deviation, 0.01):
        plan = hastiest(entry, bound)
        assert any(m.width != 1 for m in plan)
        out = flow.decode(z, plan)
        assert (out.x - exact).abs().max() <= bound
    out = flow.sample(128, seed=5)  # with the costs of this machine
    assert (out.x - exact).abs().max() <= flow.default_deviation
