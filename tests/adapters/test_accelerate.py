"""Accelerated transforms against the originals: values, log-determinants, gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jacobiflow as jf
from adapters.foreign_flows import CASES, Case, context_rows

TABLE = [(name, context) for name, case in CASES.items() for context in (0, 3) if case.conditional or not context]
DTYPES = {torch.float32: 1e-5, torch.float64: 1e-10}
pytestmark = pytest.mark.usefixtures("sweeps")


def close(a: Tensor, b: Tensor, tol: float | Tensor) -> bool:
    return bool((relative(a, b) <= tol).all())


def relative(a: Tensor, b: Tensor) -> Tensor:
    """The largest difference in each row."""
    ratio = (a - b).abs() / b.abs().clamp_min(1)
    return ratio.flatten(1).amax(1) if ratio.ndim > 1 else ratio


def tolerance(case: Case, model: nn.Module, z: Tensor, c: Tensor | None) -> float | Tensor:
    """What can be asked: bisection leaves an error, and so does the original itself in float32."""
    if case.bisection:
        x = case.run(model, z, c)[0]
        again = case.run(model, case.forward(model, x, c), c)[0]
        return max(1e-5, 3 * float((again - x).abs().max()))
    return own_error(case, model, z, c) if z.dtype == torch.float32 else DTYPES[z.dtype]


def own_error(case: Case, model: nn.Module, z: Tensor, c: Tensor | None) -> Tensor:
    """Three times the error of the original in each row, 1e-5 at least and 1e-3 at most.

    Which way a value is rounded is chance, and another on another CPU: so the original is looked at in
    several points a rounding apart, each against float64."""
    exact_model, exact_c = copy.deepcopy(model).double(), None if c is None else c.double()
    draw = torch.Generator().manual_seed(4)
    worst = torch.zeros(len(z))
    for _ in range(8):
        step = torch.randint(-1, 2, z.shape, generator=draw)
        near = z * (1 + step * torch.finfo(z.dtype).eps)
        near = near.clamp(0, 1) if case.unit else near
        values, exact = case.run(model, near, c), case.run(exact_model, near.double(), exact_c)
        for a, b in zip(values, exact, strict=True):
            worst = torch.maximum(worst, relative(a, b).float())
    return (3 * worst).clamp(1e-5, 1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "context"), TABLE)
def test_values_and_log_determinants(name: str, context: int, dtype: torch.dtype, sweeps: list[Any]) -> None:
    case = CASES[name]
    model = case.model(context, dtype)
    for n in (9, 1):
        z, c = case.noise(n, dtype=dtype), context_rows(n, dtype) if context else None
        with torch.no_grad():
            x, log_det = case.run(model, z, c)
            before = z.clone()
            with jf.accelerated(model):
                y, found = case.run(model, z, c)
            tol = tolerance(case, model, z, c)
        assert close(y, x, tol)
        assert close(found, log_det, tol)
        assert torch.equal(z, before)
        assert y.dtype == dtype
        assert y.shape == x.shape
        assert found.shape == log_det.shape
    assert len(sweeps) == (4 if name.startswith("zuko") else 2)
    assert not torch.equal(x, z)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith(("zuko", "pyro"))])
def test_sample_shapes_of_several_dimensions(name: str) -> None:
    case, dtype = CASES[name], torch.float64
    model = case.model(3, dtype)
    z, c = case.noise(2, 3, 4, dtype=dtype), context_rows(4, dtype)
    with torch.no_grad():
        x, log_det = case.run(model, z, c)
        y, found = case.run(jf.accelerate(model), z, c)
        tol = tolerance(case, model, z, c)
        assert close(y, x, tol)
        assert close(found, log_det, tol)
        one = case.run(model, z[0, 0, 0], c[0])[0]  # a single sample without a batch
        assert close(one, x[0, 0, 0], tol)


@pytest.mark.parametrize("name", ["nflows-affine", "nflows-rq-tails", "normflows-rq-circular", "pyro-spline-linear"])
@torch.no_grad()
def test_no_rows_at_all(name: str) -> None:
    case, dtype = CASES[name], torch.float64
    model = case.model(0, dtype)
    shapes = [t.shape for t in case.run(model, case.noise(0, dtype=dtype), None)]
    assert [t.shape for t in case.run(jf.accelerate(model), case.noise(0, dtype=dtype), None)] == shapes


def loss(x: Tensor, log_det: Tensor) -> Tensor:
    weight = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype)
    return (weight * x).sum() + x.square().mean() + (log_det * torch.arange(1, len(x) + 1)).sum()


@pytest.mark.parametrize(("name", "context"), [(n, c) for n, c in TABLE if CASES[n].unrolled])
def test_gradients_are_those_of_backpropagation(name: str, context: int) -> None:
    case, n = CASES[name], 4
    model = case.model(context, torch.float64)
    z = case.noise(n, dtype=torch.float64).requires_grad_()
    c = context_rows(n, torch.float64).requires_grad_() if context else None
    inputs = [z, *(() if c is None else (c,)), *model.parameters()]
    expected = torch.autograd.grad(loss(*case.run(model, z, c)), inputs, allow_unused=True)
    found = torch.autograd.grad(loss(*case.run(jf.accelerate(model), z, c)), inputs, allow_unused=True)
    assert sum(g is not None and bool(g.abs().max() > 0) for g in expected) >= 4
    for a, b in zip(found, expected, strict=True):
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        assert (a - b).abs().max() <= 1e-6 * max(1.0, b.abs().max().item())
