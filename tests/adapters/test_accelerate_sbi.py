"""sbi's posteriors and estimators, whatever library they are built on."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from sbi.inference.posteriors import DirectPosterior, EnsemblePosterior, VIPosterior
from sbi.inference.potentials.base_potential import BasePotential
from sbi.neural_nets import posterior_nn
from torch import Tensor

import jacobiflow as jf

D = 5
PRIOR = torch.distributions.MultivariateNormal(torch.zeros(D), 4 * torch.eye(D))
MODELS = {
    name: 1e-4 if name in ("zuko_sospf", "zuko_naf", "zuko_unaf", "zuko_bpf") else 1e-5
    for name in (
        *("maf", "maf_rqs", "zuko_maf", "zuko_nsf", "zuko_ncsf"),
        *("zuko_sospf", "zuko_naf", "zuko_unaf", "zuko_bpf"),
    )
}


pytestmark = pytest.mark.usefixtures("sweeps")


def posterior(model: str) -> DirectPosterior:
    torch.manual_seed(0)
    theta = PRIOR.sample((100,))
    x = theta + 0.3 * torch.randn(100, D)
    build = posterior_nn(model, hidden_features=16, num_transforms=2)
    estimator = build(theta, x)
    return DirectPosterior(estimator, PRIOR).set_default_x(x[:1])


def draw(one: Any, *shape: int) -> Tensor:
    torch.manual_seed(1)
    return one.sample(shape, show_progress_bars=False, reject_outside_prior=False)


@pytest.mark.parametrize("model", MODELS)
def test_posteriors(model: str, sweeps: list[Any]) -> None:
    one = posterior(model)
    exact = draw(one, 3, 4)
    assert jf.accelerate(one) is one
    found = draw(one, 3, 4)
    assert [len(out.x) for out in sweeps] == [12, 12]
    assert found.shape == exact.shape
    assert (found - exact).abs().max() < MODELS[model] * max(1, exact.abs().max())
    for twin in (pickle.loads(pickle.dumps(one)), copy.deepcopy(one)):
        assert torch.equal(draw(twin, 3, 4), found)
    assert len(sweeps) == 6
    many = one.posterior_estimator.sample((4,), torch.randn(3, D))  # several conditions at once
    assert many.shape == (4, 3, D)
    assert torch.equal(draw(jf.restore(one), 3, 4), exact)
    assert len(sweeps) == 8


def test_ensembles(sweeps: list[Any]) -> None:
    both = EnsemblePosterior([posterior("maf"), posterior("zuko_nsf")])
    jf.accelerate(both)
    both.set_default_x(torch.zeros(1, D))
    both.sample((8,), show_progress_bars=False)
    assert len(sweeps) >= 4
    assert any(len(out.x) for out in sweeps)


@pytest.mark.parametrize("model", ["nsf", "mdn", "made"])
def test_what_is_not_an_autoregressive_flow_is_refused(model: str) -> None:
    with pytest.raises(jf.AccelerationError, match="nothing to accelerate in DirectPosterior"):
        jf.accelerate(posterior(model))


class Gaussian(BasePotential):
    """An unnormalised target with known moments."""

    def __init__(self) -> None:
        super().__init__(PRIOR, x_o=torch.zeros(1, D))
        self.target = torch.distributions.MultivariateNormal(torch.linspace(-1, 1, D), 0.3 * torch.eye(D))

    def __call__(self, theta: Tensor, track_gradients: bool = True) -> Tensor:
        with torch.set_grad_enabled(track_gradients):
            return self.target.log_prob(theta)


def test_variational_posteriors_train_through_accelerated_samples(sweeps: list[Any]) -> None:
    torch.manual_seed(0)
    one = VIPosterior(Gaussian(), PRIOR, q="maf", num_transforms=2, hidden_features=16)
    jf.accelerate(one)
    one.set_default_x(torch.zeros(1, D))
    one.train(
        max_num_iters=50,
        min_num_iters=50,
        n_particles=64,
        learning_rate=0.03,
        show_progress_bar=False,
        quality_control=False,
        check_for_convergence=False,
    )
    assert len(sweeps) >= 2 * 50
    theta = one.sample((2000,), show_progress_bars=False)
    assert (theta.mean(0) - torch.linspace(-1, 1, D)).abs().max() < 0.25
    assert (theta.std(0) - 0.3**0.5).abs().max() < 0.2
