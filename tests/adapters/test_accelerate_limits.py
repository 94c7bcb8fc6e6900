"""Where the original must run, or what it saw be seen: hooks, odd contexts, lent and replaced weights."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import normflows as nf
import pyro.nn
import pytest
import torch
import zuko
from nflows.flows.realnvp import SimpleRealNVP
from nflows.transforms import autoregressive as nflows_ar
from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform
from nflows.transforms.made import MaskedLinear
from normflows.flows.neural_spline.autoregressive import MaskedPiecewiseRationalQuadraticAutoregressive
from pyro.distributions import transforms as pyro_t
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import jacobiflow as jf
from adapters.foreign_flows import CASES, CONTEXT, D, perturb


def affine(context: int = 0, **options: Any) -> Any:
    torch.manual_seed(0)
    options = {"use_residual_blocks": False} | options
    return perturb(MaskedAffineAutoregressiveTransform(D, 24, context or None, **options)).double()


def noise(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def outcome(run: Callable[[], Any]) -> Any:
    """What comes back, or what kind of error."""
    try:
        with torch.no_grad():
            return run()
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("rows", [(6, 4), (6, 9), (6, 1), (1, 6), (6, 2, 3), (6,)], ids=str)
@pytest.mark.parametrize("residual", [True, False])
def test_contexts_of_another_row_count_are_as_in_the_original(rows: tuple[int, ...], residual: bool) -> None:
    """Those that broadcast are broadcast, those that do not are the library's own error."""
    model = affine(CONTEXT, use_residual_blocks=residual)
    z, c = noise(rows[0]), torch.randn(*rows[1:], CONTEXT, dtype=torch.float64)
    expected = outcome(lambda: model.inverse(z, c))
    found = outcome(lambda: jf.accelerate(model).inverse(z, c))
    if isinstance(expected[0], type):
        assert found == expected
    else:
        assert (found[0] - expected[0]).abs().max() < 1e-10
        assert (found[1] - expected[1]).abs().max() < 1e-10


@pytest.mark.parametrize("name", ["nflows-affine", "zuko-maf", "normflows-affine-plain", "pyro-affine"])
@pytest.mark.parametrize("what", ["context where none is", "too wide", "none where one is", "dtype", "shape"])
def test_what_the_original_refuses_is_refused(name: str, what: str) -> None:
    case = CASES[name]
    has = case.conditional and what in ("too wide", "none where one is")
    model = case.model(CONTEXT if has else 0, torch.float64)
    z: Tensor = case.noise(4, dtype=torch.float32 if what == "dtype" else torch.float64)
    c = None
    if what in ("context where none is", "too wide"):
        c = torch.zeros(4, CONTEXT + has, dtype=torch.float64)
    if what == "shape":
        z = z[:, :-1]
    expected = outcome(lambda: case.run(model, z, c))
    found = outcome(lambda: case.run(jf.accelerate(model), z, c))
    if isinstance(expected[0], type):
        assert found == expected
    else:
        assert (found[0] - expected[0]).abs().max() < 1e-5


def test_forward_hooks_on_layers_are_honoured(sweeps: list[Any]) -> None:
    model, z = jf.accelerate(affine()), noise(5)
    with torch.no_grad():
        plain = model.inverse(z)[0]
        assert len(sweeps) == 1
        handle = model.autoregressive_net.blocks[0].register_forward_hook(lambda m, i, out: 0.5 * out)
        hooked = model.inverse(z)[0]
        assert len(sweeps) == 1
        assert (hooked - plain).abs().max() > 1e-3
        assert torch.equal(jf.restore(model).inverse(z)[0], hooked)
        jf.accelerate(model)
        handle.remove()
        assert (model.inverse(z)[0] - plain).abs().max() < 1e-10
    assert len(sweeps) == 2


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(layer)


@pytest.mark.parametrize("norm", [old_weight_norm, parametrizations.weight_norm], ids=["old", "new"])
def test_weight_norm_on_layers_is_honoured(norm: Callable[[nn.Module], nn.Module], sweeps: list[Any]) -> None:
    model, z = affine(), noise(5).requires_grad_()
    for m in list(model.modules()):
        if isinstance(m, MaskedLinear):
            norm(m)
    jf.accelerate(model)
    for _ in range(2):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith(("weight_g", "original0")):
                    p.mul_(1.3)
        jf.accelerate(model)
        x, log_det = model.inverse(z)
        found = torch.autograd.grad(x.square().sum() + log_det.sum(), list(model.parameters()))
        x, log_det = jf.restore(model).inverse(z)
        expected = torch.autograd.grad(x.square().sum() + log_det.sum(), list(model.parameters()))
        for a, b in zip(found, expected, strict=True):
            assert (a - b).abs().max() <= 1e-6 * max(1.0, b.abs().max().item())
    assert len(sweeps) == 2


def test_replaced_layers_are_honoured(sweeps: list[Any]) -> None:
    model, other, z = jf.accelerate(affine()), perturb(affine(), 0.3, seed=4), noise(5)
    with torch.no_grad():
        model.inverse(z)
        model.autoregressive_net.final_layer = other.autoregressive_net.final_layer
        model.autoregressive_net.blocks[0] = other.autoregressive_net.blocks[0]
        found = model.inverse(z)[0]
        assert (jf.restore(model).inverse(z)[0] - found).abs().max() < 1e-10
        assert len(sweeps) == 2
        jf.accelerate(model).autoregressive_net = other.autoregressive_net
        assert (model.inverse(z)[0] - other.inverse(z)[0]).abs().max() < 1e-10

        class Own(MaskedLinear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x).sin()

        net = model.autoregressive_net = copy.deepcopy(other.autoregressive_net)
        net.blocks[0].linear.__class__ = Own  # nobody knows what it does: the original runs
        sweeps.clear()
        found = model.inverse(z)[0]
        assert not sweeps
        assert torch.equal(jf.restore(model).inverse(z)[0], found)


class Sampler(nn.Module):
    """A module whose forward is the slow direction, as torch.func.functional_call takes it."""

    def __init__(self, transform: nn.Module) -> None:
        super().__init__()
        self.transform = transform

    def forward(self, z: Tensor) -> Any:
        return self.transform.inverse(z)


def test_weights_lent_by_functional_call_count(sweeps: list[Any]) -> None:
    """In values, and in gradients that are taken after the weights are given back."""
    model, z = Sampler(jf.accelerate(affine())), noise(5)
    base = {name: p.detach() for name, p in model.named_parameters()}
    shift = {name: (0.05 * torch.ones_like(p)).requires_grad_() for name, p in base.items()}
    found = []
    for change in (jf.accelerate, jf.restore):
        change(model)
        lent = {name: p + shift[name] for name, p in base.items()}
        x, log_det = torch.func.functional_call(model, lent, (z,))
        found.append((x, *torch.autograd.grad(x.square().sum() + log_det.sum(), list(shift.values()))))
    assert len(sweeps) == 1
    for a, b in zip(*found, strict=True):
        assert b.abs().max() > 1e-6
        assert (a - b).abs().max() <= 1e-6 * max(1.0, b.abs().max().item())
    with torch.no_grad():
        assert (model(z)[0] - found[0][0]).abs().max() > 1e-3


@pytest.mark.parametrize("what", ["parameter", "layer", "mode"])
def test_weights_replaced_before_the_backward_pass(what: str, sweeps: list[Any]) -> None:
    """Gradients are those of the weights that made the sample."""
    model, z = affine(dropout_probability=0.4), noise(5).requires_grad_()
    layer = model.autoregressive_net.final_layer
    wanted = [z, *model.parameters()]
    x, log_det = model.inverse(z)
    expected = torch.autograd.grad(x.square().sum() + log_det.sum(), wanted)
    x, log_det = jf.accelerate(model).inverse(z)
    if what == "parameter":
        layer.weight = nn.Parameter(2 * layer.weight.detach())
    elif what == "layer":
        model.autoregressive_net.final_layer = perturb(copy.deepcopy(layer), 0.5)
    else:
        model.train()
    found = torch.autograd.grad(x.square().sum() + log_det.sum(), wanted)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-6 * max(1.0, b.abs().max().item())
    if what == "mode":
        assert all(m.training for m in model.modules())
    elif what == "layer":
        assert model.autoregressive_net.final_layer is not layer


CHANGES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.mul_(2),
    "data": lambda p: setattr(p, "data", 2 * p.data),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ours", [True, False])
def test_weights_overwritten_before_the_backward_pass_are_an_error(change: str, ours: bool, sweeps: list[Any]) -> None:
    if ours:
        flow = jf.MAF(jf.MAFConfig(features=D, blocks=1, hidden=(24,)))
        weight, x = flow.blocks[0].head.weight, flow.decode(flow.noise(3, seed=0), differentiable=True).x
    else:
        foreign_flow = jf.accelerate(zuko.flows.MAF(32, transforms=1))
        weight = foreign_flow.transform.transforms[0].hyper[-1].weight
        x = foreign_flow().rsample((3,))
    with torch.no_grad():
        CHANGES[change](weight)
    with pytest.raises(RuntimeError, match=r"modified by an inplace|between sampling and the backward"):
        x.sum().backward()


def test_weights_replaced_in_our_own_flows_are_an_error() -> None:
    flow = jf.MAF(jf.MAFConfig(features=D, blocks=1, hidden=(24,)))
    x = flow.decode(flow.noise(3, seed=0), differentiable=True).x
    flow.blocks[0].head.weight = nn.Parameter(flow.blocks[0].head.weight.detach() + 1)
    with pytest.raises(RuntimeError, match="weights were replaced between sampling and the backward pass"):
        x.sum().backward()


def test_saved_tensors_may_be_packed_elsewhere(sweeps: list[Any]) -> None:
    model, z = jf.accelerate(affine()), noise(5)

    def gradient() -> Tensor:
        model.zero_grad()
        model.inverse(z)[0].square().sum().backward()
        return model.autoregressive_net.final_layer.weight.grad.clone()

    plain = gradient()
    with torch.autograd.graph.save_on_cpu():
        assert torch.equal(gradient(), plain)


def test_rows_without_a_finite_inverse_spoil_no_gradient(sweeps: list[Any]) -> None:
    model, z = affine(), noise(6)
    z[2] = 1e306
    z[2, ::2] = -1e306
    with torch.no_grad():
        model.autoregressive_net.final_layer.weight.mul_(3)
    jf.accelerate(model)
    with pytest.warns(RuntimeWarning, match="1 of 6 samples"):
        x, log_det = model.inverse(z.requires_grad_())
    good = x.isfinite().all(1)
    assert good.tolist() == [True, True, False, True, True, True]
    found = torch.autograd.grad(x[good].sum() + log_det[good].sum(), [z, *model.parameters()])
    rest = z.detach()[good].requires_grad_()
    x, log_det = jf.restore(model).inverse(rest)
    expected = torch.autograd.grad(x.sum() + log_det.sum(), [rest, *model.parameters()])
    assert not found[0][2].any()
    for a, b in zip((found[0][good], *found[1:]), expected, strict=True):
        assert (a - b).abs().max() <= 1e-6 * max(1.0, b.abs().max().item())


def test_transforms_of_functions_run_the_original(sweeps: list[Any]) -> None:
    model, z = jf.accelerate(affine()), noise(4)
    jacobian = torch.func.jacfwd(lambda one: model.inverse(one[None])[0][0])(z[0])
    many = torch.func.vmap(lambda one: model.inverse(one[None])[0][0])(z)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        copy.deepcopy(model).float().inverse(z.float())
    assert not sweeps
    with torch.no_grad():
        assert (many - jf.restore(model).inverse(z)[0]).abs().max() < 1e-10
    expected = torch.autograd.functional.jacobian(lambda one: model.inverse(one[None])[0][0], z[0])
    assert (jacobian - expected).abs().max() < 1e-10


@pytest.mark.parametrize("tol", [1e-6, 1e-2])
@pytest.mark.parametrize("name", ["nflows-affine", "nflows-rq-tails", "normflows-affine"])
def test_log_determinants_are_those_of_the_returned_point(name: str, tol: float, sweeps: list[Any]) -> None:
    case = CASES[name]
    model, z = case.model(0, torch.float64), case.noise(20, dtype=torch.float64)
    with torch.no_grad():
        x, log_det = jf.accelerate(model, tol=tol).inverse(z)
        assert (log_det + model.forward(x)[1]).abs().max() < 1e-9
        exact = jf.restore(model).inverse(z)[0]
    assert (tol > 1e-3) == bool((x - exact).abs().max() > 1e-9)  # a loose answer, its own log-determinant


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float64) for name in ("MAF", "NSF", "SOSPF")),
        ("SOSPF", torch.float32),  # MAF and NSF are solved one by one
    ],
)
def test_no_row_spins_at_noise(name: str, dtype: torch.dtype, sweeps: list[Any]) -> None:
    """tol=0 is as tight as the dtype, or the bisection, can hold: no row waits for more."""
    torch.manual_seed(0)
    flow = jf.accelerate(getattr(zuko.flows, name)(48, transforms=2).to(dtype), tol=0.0)
    with torch.no_grad():
        flow().transform.inv(torch.randn(8, 48, dtype=dtype))
    assert [int(out.stats.blocks[0].sweeps.max()) < 24 for out in sweeps] == [True, True]


SMALL: dict[str, Callable[[], Any]] = {
    "nflows, 1 feature": lambda: MaskedAffineAutoregressiveTransform(1, 24),
    "nflows, 2 features": lambda: MaskedAffineAutoregressiveTransform(2, 24),
    "zuko, 1 feature": lambda: zuko.flows.MAF(1, transforms=1),
    "zuko, 1 feature with context": lambda: zuko.flows.NSF(1, 3, transforms=1),
    "zuko, 2 features": lambda: zuko.flows.MAF(2, transforms=1),
    "zuko, coupling": lambda: zuko.flows.NSF(64, transforms=1, passes=2),
    "normflows, 1 feature": lambda: nf.flows.MaskedAffineAutoregressive(1, 24),
    "Pyro, 2 features": lambda: pyro_t.ConditionalAffineAutoregressive(pyro.nn.ConditionalAutoRegressiveNN(2, 3, [8])),
}


@pytest.mark.parametrize("name", SMALL)
def test_one_or_two_features_run_the_original_without_an_error(name: str) -> None:
    small = SMALL[name]()
    before = {key: dict(vars(m)) for key, m in small.named_modules()}
    assert jf.accelerate(small) is small
    assert {key: dict(vars(m)) for key, m in small.named_modules()} == before
    (entry,) = jf.acceleration(small).entries
    assert entry.runs == "original"
    assert entry.why in ("its own inverse takes 1 passes", "its own inverse takes 2 passes")


NOTHING: dict[str, tuple[str, Callable[[], Any]]] = {
    "nflows": ("2 AffineCouplingTransform", lambda: SimpleRealNVP(4, 8, 2, 1)),
    "normflows": ("1 CoupledRationalQuadraticSpline", lambda: nf.flows.CoupledRationalQuadraticSpline(4, 1, 8)),
    "normflows, masked": ("1 MaskedAffineFlow", lambda: nf.flows.MaskedAffineFlow(torch.ones(2))),
    "zuko": ("2 GeneralCouplingTransform", lambda: zuko.flows.RealNVP(4, transforms=2)),
    "Pyro": ("1 AffineCoupling", lambda: pyro_t.affine_coupling(4)),
    "ours": ("flows of jacobiflow are fast by themselves: call", lambda: jf.MAF(jf.MAFConfig(features=3))),
    "a name": ("give an object that holds a flow, not 'mnist'", lambda: "mnist"),
    "a class": ("give an object that holds a flow, not <class", lambda: jf.MAF),
}


@pytest.mark.parametrize("name", NOTHING)
def test_what_needs_no_acceleration_is_told_why(name: str) -> None:
    words, make = NOTHING[name]
    with pytest.raises(jf.AccelerationError, match=words) as caught:
        jf.accelerate(make())
    coupling = words[0].isdigit()
    assert ("coupling layers sample in one pass already" in str(caught.value)) == coupling
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [1e6, 3e7, 1e9, 3.4e38])
def test_pyros_clamp_rounds_as_pyro_does(size: float) -> None:
    """It adds what was clamped off to the number itself, which then is 0 if that is large."""
    torch.manual_seed(0)
    flow = pyro_t.AffineAutoregressive(pyro.nn.AutoRegressiveNN(8, [16]))
    z = torch.randn(12, 8)
    with torch.no_grad():
        flow.arn.layers[-1].bias[8:] = size
        want = flow.inv(z)
        flow.clear_cache()
        torch.testing.assert_close(jf.accelerate(flow).inv(z), want, atol=1e-6, rtol=1e-6)


_slope_one = functools.partial(zuko.transforms.MonotonicAffineTransform, slope=1.0)
_tails: dict[str, Any] = {"features": D, "hidden_features": 24, "tails": "linear", "tail_bound": 3.0}
ODD: dict[str, Callable[[], Any]] = {
    "nflows, one bin": lambda: nflows_ar.MaskedPiecewiseRationalQuadraticAutoregressiveTransform(**_tails, num_bins=1),
    "normflows, one bin": lambda: MaskedPiecewiseRationalQuadraticAutoregressive(**_tails, num_bins=1),
    "zuko, one bin": lambda: zuko.flows.NSF(D, transforms=1, bins=1),
    "zuko, slope 1": lambda: zuko.flows.MAF(D, transforms=1, univariate=_slope_one, shapes=[(), ()]),
}


@pytest.mark.parametrize("name", ODD)
def test_maps_that_are_hardly_maps_are_the_librarys(name: str) -> None:
    torch.manual_seed(0)
    flow, z = perturb(ODD[name]()), torch.randn(5, D)

    def run() -> Tensor:
        return flow().transform.inv(z) if name.startswith("zuko") else flow.inverse(z)[0]

    with torch.no_grad():
        want = run()
        jf.accelerate(flow)
        torch.testing.assert_close(run(), want, equal_nan=True, atol=1e-5, rtol=1e-5)
