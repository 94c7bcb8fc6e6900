"""What was found against the unaccelerated originals, and runs with many contexts."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import zuko
from nflows.distributions.normal import StandardNormal
from nflows.flows import Flow
from nflows.transforms import CompositeTransform
from nflows.transforms import autoregressive as nflows_ar
from torch import Tensor, nn

import jacobiflow as jf
from adapters.foreign_flows import perturb
from adapters.test_accelerate_sbi import posterior
from jacobiflow.adapters import inverter

_wide: dict[str, Any] = {"features": 20, "hidden_features": 30, "num_blocks": 5}
LAWS: dict[str, tuple[Any, Any]] = {
    "affine": (nflows_ar.MaskedAffineAutoregressiveTransform, torch.randn),
    "linear": (nflows_ar.MaskedPiecewiseLinearAutoregressiveTransform, torch.rand),
    "quadratic": (nflows_ar.MaskedPiecewiseQuadraticAutoregressiveTransform, torch.rand),
    "cubic": (nflows_ar.MaskedPiecewiseCubicAutoregressiveTransform, torch.rand),
    "rational quadratic": (nflows_ar.MaskedPiecewiseRationalQuadraticAutoregressiveTransform, torch.rand),
}


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", LAWS)
def test_forward_and_inverse_of_fresh_float32_weights_are_consistent(
    name: str, residual: bool, sweeps: list[Any]
) -> None:
    """nflows' own law, within 1e-5. The originals of linear and quadratic splines miss it, by up to 3e-4; ours then
    miss it by the same, up to rounding."""
    kind, draw = LAWS[name]
    for seed in range(4):
        torch.manual_seed(seed)
        options = {"num_bins": 10} if draw is torch.rand else {}
        one, z = kind(**_wide, **options, use_residual_blocks=residual), draw(10, 20)
        gaps = []
        for change in (jf.restore, jf.accelerate):
            x, log_det = change(one).inverse(z)
            back, forth = one.forward(x)
            gaps.append(max((back - z).abs().max().item(), (log_det + forth).abs().max().item()))
        assert gaps[1] < max(1e-5, 1.1 * gaps[0])
    assert len(sweeps) == 4


@pytest.mark.parametrize("name", ["NAF", "UNAF"])
def test_gradients_of_neural_maps_are_those_of_finite_differences(
    name: str, sweeps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours are. Backpropagation through zuko's own inverse is off for the weights of the univariate map."""
    create = zuko.transforms.MonotonicTransform.__init__
    monkeypatch.setattr(  # bisection to rounding, so that differences can be taken
        zuko.transforms.MonotonicTransform,
        "__init__",
        lambda self, *a, **k: create(self, *a, **k | {"eps": 1e-13}),
    )
    torch.manual_seed(0)
    options = {"hidden_features": (8,), "network": {"hidden_features": (6,)}, "signal": 3}
    flow = getattr(zuko.flows, name)(5, transforms=1, **options).double()
    z, pull = 0.5 * torch.randn(3, 5).double(), torch.linspace(-1, 1, 5).double()
    names, weights = zip(*flow.named_parameters(), strict=True)

    def loss() -> Tensor:
        return (pull * flow().transform.inv(z)).sum()

    theirs = torch.autograd.grad(loss(), weights)
    ours = torch.autograd.grad(jf.accelerate(flow) and loss(), weights)
    jf.restore(flow)
    off = {}
    with torch.no_grad():
        for which, p, a, b in zip(names, weights, theirs, ours, strict=True):
            flat, i, size = p.view(-1), int((a - b).abs().argmax()), b.abs().max()
            middle, values = flat[i].item(), []
            for step in (1e-5, -1e-5):
                flat[i] = middle + step
                values.append(loss())
            flat[i] = middle
            difference = (values[0] - values[1]) / 2e-5
            assert abs(b.flatten()[i] - difference) < 1e-5 * size, which
            off[which] = float(abs(a.flatten()[i] - difference) / size)
    assert max(v for k, v in off.items() if "univariate" in k) > 1e-3
    assert max(v for k, v in off.items() if "hyper" in k) < 1e-5
    assert len(sweeps) == 1


def many(context: int) -> Flow:
    torch.manual_seed(0)
    steps = [nflows_ar.MaskedAffineAutoregressiveTransform(8, 24, context) for _ in range(2)]
    return perturb(Flow(CompositeTransform(steps), StandardNormal([8])), 0.2)


def test_ten_thousand_contexts_with_one_sample_each(decoded: list[Any], sweeps: list[Any]) -> None:
    """One solution per transform, no pass of the network, whatever the number of contexts."""
    flow, context = many(3), torch.randn(10_000, 3)
    passes: list[int] = []
    for transform in flow._transform._transforms:
        net = transform.autoregressive_net
        forward = type(net).forward
        type(net).forward = lambda self, x, c=None, f=forward: (passes.append(len(x)), f(self, x, c))[1]
    try:
        with torch.no_grad():
            torch.manual_seed(1)
            x = jf.accelerate(flow).sample(1, context=context)
            assert [len(out.x) for out in decoded] == [10_000, 10_000]
            assert max(passes, default=0) < 100  # self-tests only
            torch.manual_seed(1)
            exact = jf.restore(flow).sample(1, context=context)
    finally:
        type(net).forward = forward
    assert x.shape == (10_000, 1, 8)
    torch.testing.assert_close(x, exact, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gradients", [False, True])
def test_memory_is_bounded_by_solving_in_parts(
    gradients: bool, sweeps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts of a batch have the contexts of their rows, and give the answer of the whole."""
    flow, context, z = many(3), torch.randn(50, 3), torch.randn(50, 8)
    transform = jf.accelerate(flow._transform._transforms[0])
    numbers = 8 + sum(link.linear.out_features for link in transform.inverse.inverter().spec.network.links)
    found = []
    for most in (1 << 24, 20 * numbers):
        monkeypatch.setattr(inverter, "MOST_NUMBERS", most)
        with torch.set_grad_enabled(gradients):
            x, log_det = transform.inverse(z, context)
        leaves = list(transform.parameters())
        found.append((x, log_det, *(torch.autograd.grad(x.sum() + log_det.sum(), leaves) if gradients else ())))
    assert [len(out.x) for out in sweeps] == [50, 20, 20, 10]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    shared = transform.inverse(z, context[:1].expand(50, -1))[0]
    torch.testing.assert_close(shared[:1], transform.inverse(z[:1], context[:1])[0])


@pytest.mark.parametrize("model", ["maf", "zuko_nsf"])
def test_many_observations_at_once(model: str, sweeps: list[Any]) -> None:
    """sbi's `sample_batched`: every transform is solved once for all observations and samples."""
    one = jf.accelerate(posterior(model))
    x = torch.randn(20, 5)
    options = {"show_progress_bars": False, "reject_outside_prior": False, "max_sampling_batch_size": 1000}
    draws = one.sample_batched((30,), x, **options)
    assert draws.shape == (30, 20, 5)
    assert [len(out.x) for out in sweeps] == [600, 600]
    assert draws.isfinite().all()


def test_one_bad_observation_delays_nobody(sweeps: list[Any]) -> None:
    flow = many(3).double()
    transform = jf.accelerate(flow._transform._transforms[0])
    context, z = torch.randn(40, 3).double(), torch.randn(40, 8).double()
    with torch.no_grad():
        good = transform.inverse(z, context)[0]
        context[7] = float("inf")
        with pytest.warns(RuntimeWarning, match="1 of 40 samples"):
            x = transform.inverse(z, context)[0]
    rest = torch.arange(40) != 7
    assert x[7].isnan().all()
    torch.testing.assert_close(x[rest], good[rest], atol=1e-11, rtol=1e-11)
    before, after = (out.stats.blocks[0].sweeps for out in sweeps)
    assert torch.equal(before[rest], after[rest])


def test_samples_with_log_probabilities_take_the_fewest_passes(sweeps: list[Any]) -> None:
    """None with C kernels and without gradients, where the original takes one per feature and one more."""
    torch.manual_seed(0)
    flow, passes = perturb(zuko.flows.NSF(6, 3, transforms=2, hidden_features=(16,))), list[int]()
    for lazy in flow.transform.transforms:
        lazy.hyper[0].__class__ = counting(type(lazy.hyper[0]), passes)
    c, counts, found = torch.randn(4, 3), [], []
    for change in (jf.restore, jf.accelerate):
        change(flow)
        with torch.no_grad():
            flow(c).sample()  # packs the weights
            passes.clear()
            torch.manual_seed(1)
            found.append(flow(c).rsample_and_log_prob((5,)))
        counts.append(len(passes))
    assert counts == [2 * 7, 0]
    assert len(sweeps) == 4
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def counting(kind: type[nn.Module], passes: list[int]) -> type[nn.Module]:
    """The same layer, which counts its calls."""

    def forward(self: Any, x: Tensor) -> Any:
        passes.append(1)
        return kind.forward(self, x)

    return type(kind.__name__, (kind,), {"forward": forward})


def test_log_probabilities_of_other_points_are_computed(sweeps: list[Any]) -> None:
    """What is remembered is the last solution, once, and only for that very tensor."""
    flow = perturb(zuko.flows.MAF(6, transforms=1, hidden_features=(16,)))
    z = torch.randn(4, 6)
    with torch.no_grad():
        exact = flow().transform
        transform = jf.accelerate(copy.deepcopy(flow))().transform
        x = transform.inv(z)
        for at in (x, x.clone(), x + 1):
            y = exact(at)
            expected = exact.log_abs_det_jacobian(at, y)
            torch.testing.assert_close(transform.log_abs_det_jacobian(at, y), expected, atol=1e-5, rtol=1e-5)
