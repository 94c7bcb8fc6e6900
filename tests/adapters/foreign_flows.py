"""Transforms of other libraries that acceleration is tested on, by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import normflows as nf
import pyro.nn
import torch
import zuko
from nflows.transforms import autoregressive as nflows_ar
from normflows.flows.neural_spline.autoregressive import MaskedPiecewiseRationalQuadraticAutoregressive
from pyro.distributions import transforms as pyro_t
from torch import Tensor, nn

D, CONTEXT = 10, 3


def perturb(model: nn.Module, scale: float = 0.1, seed: int = 0) -> nn.Module:
    """Weights away from where a fresh model, often the identity, leaves them."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(scale * torch.randn(p.shape, generator=draw).to(p))
        for m in model.modules():
            if isinstance(m, nn.BatchNorm1d):
                m.running_mean.add_(torch.randn(m.running_mean.shape, generator=draw).to(m.running_mean))
                m.running_var.mul_(2)
    return model.eval()


@dataclass(frozen=True)
class Case:
    """make(context features) gives a model, run(model, z, context) its x and log |dx/dz|."""

    make: Callable[[int], nn.Module]
    run: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    forward: Callable[[Any, Tensor, Tensor | None], Tensor]
    unit: bool = False  # lives on the unit cube
    bisection: bool = False
    conditional: bool = True
    unrolled: bool = True  # whether the original can be differentiated

    def model(self, context: int, dtype: torch.dtype, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # Pyro makes tensors of the default dtype
        try:
            return perturb(self.make(context).to(dtype), seed=seed)
        finally:
            torch.set_default_dtype(before)

    def noise(self, *shape: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
        z = torch.randn(*shape, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return (torch.special.ndtr(z) if self.unit else z).to(dtype)


def context_rows(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, CONTEXT, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(dtype)


def _made(kind: Callable[..., nn.Module], **options: Any) -> Callable[[int], nn.Module]:
    return lambda context: kind(features=D, hidden_features=24, context_features=context or None, **options)


def _made_case(
    kind: Callable[..., nn.Module],
    unit: bool = False,
    conditional: bool = True,
    **options: Any,
) -> Case:
    return Case(
        _made(kind, **options),
        lambda m, z, c: m.inverse(z, c),
        lambda m, x, c: m.forward(x, c)[0],
        unit=unit,
        conditional=conditional,
    )


def _zuko_case(name: str, bisection: bool = False, **options: Any) -> Case:
    def make(context: int) -> nn.Module:
        return getattr(zuko.flows, name)(D, context, transforms=2, **({"hidden_features": (24, 24)} | options))

    def run(flow: Any, z: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
        return flow(c).transform.inv.call_and_ladj(z)

    return Case(
        make,
        run,
        lambda flow, x, c: flow(c).transform(x),
        bisection=bisection,
        unrolled=not bisection,
    )


def _pyro_run(t: Any, z: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    t = t if c is None else t.condition(c)
    before = torch.get_default_dtype()
    torch.set_default_dtype(z.dtype)
    try:
        t.clear_cache()
        x = t.inv(z)
        return x, -t.log_abs_det_jacobian(x, z)
    finally:
        torch.set_default_dtype(before)


def _pyro_case(kind: str, param_dims: list[int], **options: Any) -> Case:
    def make(context: int) -> nn.Module:
        if not context:
            net = pyro.nn.AutoRegressiveNN(D, [24, 24], param_dims=param_dims, skip_connections=skip)
            first = () if kind == "Affine" else (D,)
            return getattr(pyro_t, f"{kind}Autoregressive")(*first, net, **options)
        net = pyro.nn.ConditionalAutoRegressiveNN(D, context, [24, 24], param_dims=param_dims)
        first = () if kind == "Affine" else (D,)
        return getattr(pyro_t, f"Conditional{kind}Autoregressive")(*first, net, **options)

    skip = options.pop("skip", False)
    return Case(make, _pyro_run, lambda t, x, c: (t if c is None else t.condition(c))(x))


def _graph() -> Tensor:
    """A sparse acyclic graph whose natural order is not an order of it."""
    draw = torch.Generator().manual_seed(0)
    lower = torch.rand(D, D, generator=draw).tril() > 0.6
    mixed = torch.randperm(D, generator=draw)
    return (lower | torch.eye(D, dtype=torch.bool))[mixed][:, mixed]


_steep = functools.partial(zuko.transforms.MonotonicAffineTransform, slope=2.0)  # which bounds nothing
_Affine = nflows_ar.MaskedAffineAutoregressiveTransform
_RQ = nflows_ar.MaskedPiecewiseRationalQuadraticAutoregressiveTransform
_Quadratic = nflows_ar.MaskedPiecewiseQuadraticAutoregressiveTransform
_plain: dict[str, Any] = {"use_residual_blocks": False, "activation": torch.tanh}

CASES: dict[str, Case] = {
    "nflows-affine": _made_case(_Affine),
    "nflows-affine-plain": _made_case(_Affine, **_plain),
    "nflows-affine-plain-norm": _made_case(_Affine, **_plain, use_batch_norm=True),
    "nflows-affine-norm": _made_case(_Affine, use_batch_norm=True, dropout_probability=0.3),
    "nflows-affine-random": _made_case(_Affine, **_plain, random_mask=True),
    "nflows-affine-own-activation": _made_case(_Affine, activation=lambda x: x * torch.sigmoid(x)),
    "nflows-linear": _made_case(nflows_ar.MaskedPiecewiseLinearAutoregressiveTransform, unit=True, num_bins=6),
    "nflows-quadratic": _made_case(_Quadratic, unit=True),
    "nflows-quadratic-tails": _made_case(_Quadratic, tails="linear", tail_bound=3.0),
    "nflows-cubic": _made_case(nflows_ar.MaskedPiecewiseCubicAutoregressiveTransform, unit=True, num_bins=6),
    "nflows-rq": _made_case(_RQ, unit=True),
    "nflows-rq-tails": _made_case(_RQ, tails="linear", tail_bound=3.0),
    "nflows-rq-uneven": _made_case(_RQ, tails="linear", tail_bound=3.0, min_bin_width=1e-2),
    "zuko-maf": _zuko_case("MAF"),
    "zuko-maf-residual": _zuko_case("MAF", residual=True, hidden_features=(24, 24, 32), activation=nn.ELU),
    "zuko-maf-passes": _zuko_case("MAF", passes=4, randperm=True),
    "zuko-maf-graph": _zuko_case("MAF", adjacency=_graph()),
    "zuko-maf-bare": _zuko_case("MAF", hidden_features=()),
    "zuko-nsf": _zuko_case("NSF"),
    "zuko-nsf-randperm": _zuko_case("NSF", randperm=True, bins=5),
    "zuko-maf-slope": _zuko_case("MAF", univariate=_steep, shapes=[(), ()]),
    "zuko-ncsf": _zuko_case("NCSF"),
    "zuko-sospf": _zuko_case("SOSPF", bisection=True),
    "zuko-naf": _zuko_case("NAF", bisection=True, randperm=True, network={"hidden_features": (8,)}, signal=4),
    "zuko-unaf": _zuko_case("UNAF", bisection=True, network={"hidden_features": (8,)}, signal=4),
    "zuko-bpf": _zuko_case("BPF", bisection=True),
    "normflows-affine": _made_case(nf.flows.MaskedAffineAutoregressive),
    "normflows-affine-plain": _made_case(
        nf.flows.MaskedAffineAutoregressive, conditional=False, use_residual_blocks=False, use_batch_norm=True
    ),
    "normflows-rq": _made_case(
        MaskedPiecewiseRationalQuadraticAutoregressive, tails="linear", tail_bound=3.0, permute_mask=True
    ),
    "normflows-rq-unit": _made_case(MaskedPiecewiseRationalQuadraticAutoregressive, unit=True),
    "normflows-rq-circular": _made_case(
        MaskedPiecewiseRationalQuadraticAutoregressive,
        tails=["linear", "circular"] * (D // 2),
        tail_bound=torch.linspace(2, 4, D),
        permute_mask=True,
    ),
    "pyro-affine": _pyro_case("Affine", [1, 1]),
    "pyro-affine-stable": _pyro_case("Affine", [1, 1], stable=True),
    "pyro-affine-skip": _pyro_case("Affine", [1, 1], skip=True),
    "pyro-spline-linear": _pyro_case("Spline", [8, 8, 7, 8]),
    "pyro-spline-quadratic": _pyro_case("Spline", [8, 8, 7], order="quadratic"),
}
