"""Copies of nflows under another name: recognised by structure, checked by the self-test."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import nflows.transforms.autoregressive
import nflows.transforms.made
import pytest
import torch
from nflows.transforms import CompositeTransform
from torch import Tensor, nn

import jacobiflow as jf
from adapters.foreign_flows import CASES, CONTEXT, D, perturb
from jacobiflow.adapters import made, recognise
from jacobiflow.adapters.transform_spec import Declined


def fork(module: ModuleType) -> Any:
    """The same source as another module: none of its classes is a class of nflows."""
    assert module.__file__
    spec = importlib.util.spec_from_file_location(f"fork_of_{module.__name__.split('.')[-1]}", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    copied = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copied)
    return copied


FORK = fork(nflows.transforms.autoregressive)
FORK.made_module = fork(nflows.transforms.made)
Affine = FORK.MaskedAffineAutoregressiveTransform
Spline = FORK.MaskedPiecewiseRationalQuadraticAutoregressiveTransform


class ExpScale(Affine):
    """Another scale, as copies of nflows offer it."""

    def scale(self, u: Tensor) -> Tensor:
        return u.exp()

    def _elementwise_forward(self, inputs: Tensor, autoregressive_params: Tensor) -> Any:
        u, shift = self._unconstrained_scale_and_shift(autoregressive_params)
        return self.scale(u) * inputs + shift, self.scale(u).log().sum(1)

    def _elementwise_inverse(self, inputs: Tensor, autoregressive_params: Tensor) -> Any:
        u, shift = self._unconstrained_scale_and_shift(autoregressive_params)
        return (inputs - shift) / self.scale(u), -self.scale(u).log().sum(1)


class ClampedScale(ExpScale):
    """Equal to nflows' scale up to a bound."""

    def scale(self, u: Tensor) -> Tensor:
        return (nn.functional.softplus(u) + 1e-3).clamp(max=30.0)


class HiddenFeatures(Spline):
    """A network with this attribute divides the parameters of splines, in place."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, tails="linear", tail_bound=3.0, **options)
        self.autoregressive_net.hidden_features = 24


class HalfStep(FORK.made_module.MaskedResidualBlock):
    def forward(self, inputs: Tensor, context: Tensor | None = None) -> Tensor:
        return inputs + 0.5 * (super().forward(inputs, context) - inputs)


class SinLayer(FORK.made_module.MaskedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


class LeakingMade(FORK.made_module.MADE):
    def forward(self, inputs: Tensor, context: Tensor | None = None) -> Tensor:
        return super().forward(inputs, context) + inputs.sum(1, keepdim=True)


class RoundedInverse(Affine):
    def inverse(self, inputs: Tensor, context: Tensor | None = None) -> Any:
        x, log_det = super().inverse(inputs, context)
        return x.round(), log_det


class NearlyInverse(Affine):
    """Each feature is solved to 1e-4 of itself."""

    def inverse(self, inputs: Tensor, context: Tensor | None = None) -> Any:
        x, log_det = super().inverse(inputs, context)
        return x * (1 + 1e-4), log_det


class ScaledContext(Affine):
    def inverse(self, inputs: Tensor, context: Tensor | None = None) -> Any:
        return super().inverse(inputs, None if context is None else 2 * context)


def model(kind: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return perturb(kind(features=D, hidden_features=24, **options)).double()


def half_step() -> Any:
    changed = model(Affine)
    for block in changed.autoregressive_net.blocks:
        block.__class__ = HalfStep
    return changed


def with_class(target: str, kind: type) -> Any:
    """A fresh transform, whose weights may be zero, with another class somewhere."""
    changed = Affine(features=D, hidden_features=24).double().eval()
    nn.init.zeros_(changed.autoregressive_net.final_layer.weight)
    (changed.get_submodule(target)).__class__ = kind
    return changed


ACCEPTED = {  # what the self-test chooses: a map of ours or the transform's own, units cached or not
    "affine": (lambda: model(Affine), "ScaleAffine", True),
    "spline": (lambda: model(Spline, tails="linear", tail_bound=3.0), "SoftplusSpline", True),
    "another scale": (lambda: model(ExpScale), "ForeignMap", True),
    "a clamped scale": (lambda: model(ClampedScale), "ForeignMap", True),
    "divided parameters": (lambda: model(HiddenFeatures), "ForeignMap", True),
    "another residual step": (half_step, "ScaleAffine", False),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_copies_are_recognised(name: str, sweeps: list[Any]) -> None:
    make, bijector, packed = ACCEPTED[name]
    one, z = make(), torch.randn(7, D, dtype=torch.float64)
    with torch.no_grad():
        expected = one.inverse(z)
        found = jf.accelerate(one).inverse(z)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)
    assert len(sweeps) == 1
    assert type(one.inverse.shared.spec.bijector).__name__ == bijector
    assert (one.inverse.shared.spec.network.activation is not None) == packed


@pytest.mark.parametrize("bins", [2, 20, 200])
@pytest.mark.parametrize("kind", ["Linear", "Quadratic", "Cubic", "RationalQuadratic"])
def test_splines_of_few_and_many_bins_are_recognised(kind: str, bins: int) -> None:
    """nflows' linear splines are the least exact ones: the edges of their bins are float32 numbers."""
    spline = getattr(FORK, f"MaskedPiecewise{kind}AutoregressiveTransform")
    assert made.Inverse(model(spline, num_bins=bins), 0.0).spec().maps


def test_context_of_copies(sweeps: list[Any]) -> None:
    one, z = model(Affine, context_features=CONTEXT), torch.randn(7, D, dtype=torch.float64)
    context = torch.randn(7, CONTEXT, dtype=torch.float64)
    with torch.no_grad():
        expected = one.inverse(z, context)[0]
        torch.testing.assert_close(jf.accelerate(one).inverse(z, context)[0], expected, atol=1e-9, rtol=1e-9)
    assert len(sweeps) == 1


DECLINED = {
    "does not undo its forward": lambda: model(RoundedInverse),
    "NearlyInverse: its inverse method does not undo": lambda: model(NearlyInverse),
    "does not pass context on": lambda: model(ScaledContext),
    "SinLayer layer is not a masked linear map": lambda: with_class("autoregressive_net.initial_layer", SinLayer),
    "depend on later features": lambda: with_class("autoregressive_net", LeakingMade),
}


@pytest.mark.parametrize("reason", DECLINED)
def test_copies_that_compute_something_else_are_declined(reason: str) -> None:
    with pytest.raises(jf.AccelerationError, match=reason):
        jf.accelerate(DECLINED[reason]())


def test_a_declined_part_of_a_flow_is_named() -> None:
    flow = CompositeTransform([model(Affine), model(RoundedInverse)])
    with pytest.warns(UserWarning, match="1 RoundedInverse: its inverse method does not undo"):
        jf.accelerate(flow)
    assert "inverse" in vars(flow._transforms[0])
    assert "inverse" not in vars(flow._transforms[1])


@pytest.mark.parametrize("name", CASES)
def test_the_self_test_leaves_no_trace(name: str) -> None:
    one = CASES[name].model(0, torch.float32).train()
    tensors = {k: (v, v.clone()) for k, v in one.state_dict(keep_vars=True).items()}
    attributes = {k: dict(vars(m)) for k, m in one.named_modules()}
    state = torch.random.get_rng_state()
    with jf.accelerated(one):
        pass
    assert torch.equal(torch.random.get_rng_state(), state)
    now = one.state_dict(keep_vars=True)
    assert all(now[k] is v and torch.equal(v, before) for k, (v, before) in tensors.items())
    assert {k: dict(vars(m)) for k, m in one.named_modules()} == attributes
    assert all(m.training for m in one.modules())


def test_the_self_test_is_repeated_when_an_option_changes() -> None:
    one = model(Affine)
    first = made.Inverse(one, 0.0).spec()
    one._epsilon = 0.1
    second = made.Inverse(one, 0.0).spec()
    assert (first.bijector.eps, second.bijector.eps) == (1e-3, 0.1)
    one.autoregressive_net.blocks[0].linear_layers[0].__class__ = SinLayer
    with pytest.raises(Declined, match="SinLayer"):
        made.Inverse(one, 0.0).spec()


def test_the_self_test_runs_once_for_transforms_that_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognise, "_tested", WeakKeyDictionary())  # earlier tests may have left modules
    tested: list[Any] = []
    choose = recognise._choose_map
    monkeypatch.setattr(recognise, "_choose_map", lambda spec: tested.append(spec) or choose(spec))
    jf.accelerate(CompositeTransform([model(Affine) for _ in range(3)]))
    assert len(tested) == 1
    tested.clear()
    others = [
        model(Affine, activation=torch.tanh),
        model(Affine, random_mask=True, use_residual_blocks=False),
    ]
    jf.accelerate(CompositeTransform([*others, model(ExpScale)]))
    assert len(tested) == 3
