"""Gradients through samples against backpropagation through all positions. float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from subjects import NAMES, Subject, maf, subject


def unrolled(one: Subject, z: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sequential decoding written so that autograd can follow it: T full passes per block."""
    flow = one.flow
    seq, log_det = flow.to_prior(z), torch.zeros(len(z), dtype=z.dtype)
    var = flow.prior_var()
    if var is not None:
        log_det = log_det + 0.5 * var.log().sum()
    for k in reversed(range(len(flow.blocks))):
        (conditioner, bijector), order = flow.bind(k, len(z), condition, one.guidance), flow.order(k)
        seq = seq if order is None else seq[:, order]
        x = torch.zeros_like(seq)
        for _ in range(conditioner.length):
            x, slope = bijector.inverse(seq, conditioner.all_params(x))
        log_det = log_det + slope.flatten(1).sum(1)
        seq = x if order is None else x[:, torch.argsort(order)]
    return flow.from_sequence(seq), log_det


def loss(x: Tensor, log_det: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, x[0].numel(), dtype=x.dtype).reshape(x.shape[1:])
    return (weight * x).sum() + x.square().mean() + (log_det * torch.arange(1, len(x) + 1)).sum()


@pytest.mark.parametrize(("name", "plan"), [(n, "uniform") for n in NAMES] + [("maf-affine", "sequential")])
def test_gradients_are_those_of_backpropagation(name: str, plan: str) -> None:
    one = subject(name)
    flow, n = one.flow, 3
    flow.requires_grad_(True)
    try:
        z = flow.noise(n, seed=1).requires_grad_()
        given = one.condition(n)
        if "context" in given:
            given["context"] = given["context"].clone().requires_grad_()
        inputs = [z, *(v for v in given.values() if v.requires_grad), *flow.parameters()]
        out = one.decode(z, plan, differentiable=True, **given)
        found = torch.autograd.grad(loss(out.x, out.log_det), inputs, allow_unused=True)
        condition = flow._condition(n, **({"labels": None, "context": None} | given))
        x, log_det = unrolled(one, z, condition)
        assert (x - out.x).abs().max() < 1e-9
        expected = torch.autograd.grad(loss(x, log_det), inputs, allow_unused=True)
        assert sum(e is not None and bool(e.abs().max() > 0) for e in expected) > 5
        for a, b in zip(found, expected, strict=True):
            a, b = (torch.zeros(()) if g is None else g for g in (a, b))
            assert (a - b).abs().max() < 1e-6 * max(1.0, b.abs().max().item())
    finally:
        flow.requires_grad_(False)


def test_nothing_is_kept_unless_asked_for() -> None:
    flow = maf(1.0).double()
    z = flow.noise(2, seed=0).requires_grad_()
    assert not flow.decode(z).x.requires_grad
    assert flow.decode(z, differentiable=True).x.requires_grad
    with torch.no_grad():
        assert not flow.decode(z, differentiable=True).x.requires_grad
    out = flow.decode(flow.noise(2, seed=0), differentiable=True)  # gradients to the weights alone
    out.x.sum().backward()
    assert flow.blocks[0].head.weight.grad.abs().max() > 0


def test_second_derivatives_are_a_clear_error() -> None:
    flow = maf(1.0).double()
    z = flow.noise(2, seed=0).requires_grad_()
    x = flow.decode(z, differentiable=True).x
    with pytest.raises(RuntimeError, match="second derivatives of decoded samples are not supported"):
        torch.autograd.grad(x.sum(), z, create_graph=True)


def test_a_loose_tolerance_biases_gradients_and_the_default_is_tight() -> None:
    flow = maf(1.2).double()
    z = flow.noise(4, seed=0)

    def gradient(**options: object) -> Tensor:
        flow.zero_grad()
        flow.decode(z, differentiable=True, **options).x.square().sum().backward()
        return flow.blocks[0].linears[0].weight.grad.clone()

    exact = gradient(plan="sequential")
    assert (gradient() - exact).abs().max() < 1e-9 * exact.abs().max()
    assert (gradient(tol=0.3) - exact).abs().max() > 1e-6 * exact.abs().max()


@pytest.mark.filterwarnings("ignore:tol .* is loose")
def test_memory_does_not_grow_with_sweeps() -> None:
    """What the graph keeps of a sample: its values, not its sweeps."""

    def kept(tol: float) -> tuple[int, int]:
        flow = maf(1.2, features=64, blocks=1).double()
        sizes: list[int] = []

        def pack(t: Tensor) -> Tensor:
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = flow.decode(flow.noise(4, seed=0), "uniform", tol=tol, differentiable=True)
        return sum(sizes), int(out.stats.blocks[0].sweeps.max())

    (few, a), (many, b) = kept(1.0), kept(0.0)
    assert b > 3 * a
    assert few == many


def test_reverse_kl_training_works() -> None:
    """The real use: a flow fitted to a density by its own samples."""
    torch.manual_seed(0)
    flow = jf.MAF(jf.MAFConfig(features=3, blocks=2, hidden=(16,)))
    covariance = torch.tensor([[1.0, 0.8, 0.2], [0.8, 1.5, -0.3], [0.2, -0.3, 0.5]])
    target = torch.distributions.MultivariateNormal(torch.tensor([1.0, -2.0, 0.5]), covariance)
    optimizer = torch.optim.Adam(flow.parameters(), lr=0.03)

    def gap(z: Tensor, **options: object) -> Tensor:
        out = flow.decode(z, **options)
        log_q = -0.5 * (z.square().sum(1) + 3 * torch.log(torch.tensor(2 * torch.pi))) - out.log_det
        return (log_q - target.log_prob(out.x)).mean()

    before = gap(flow.noise(2000, seed=0)).item()
    for step in range(150):
        optimizer.zero_grad()
        gap(flow.noise(64, seed=step), differentiable=True).backward()
        optimizer.step()
    after = gap(flow.noise(2000, seed=0)).item()
    assert before > 2
    assert 0 <= after < 0.1
