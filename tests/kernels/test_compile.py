"""The torch.compile backend: the same answers, and one compilation per shape for all frontiers and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import jacobiflow as jf
from jacobiflow.flows.guidance import Guided
from jacobiflow.flows.transformer import TransformerConditioner
from jacobiflow.kernels import compile
from jacobiflow.kernels.backend import bind
from subjects import Subject, maf, subject, tarflow


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts what would be compiled and runs it as it is, so that no test waits for a C++ compiler."""
    count = CompileCounter()
    torch.compiler.reset()
    compile.step.cache_clear()
    monkeypatch.setattr(compile, "options", lambda device: {"backend": count})
    yield count
    compile.step.cache_clear()
    torch.compiler.reset()


def test_compiling_is_announced(counter: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(compile, "announce", said.append)
    flow = tarflow(0.2, layers_per_block=1).double()
    flow.sample(2, seed=0, plan="sequential", backend="compile")
    assert said == ["torch compiles the network, once per batch size and width: this takes up to a minute"]
    flow.sample(2, seed=1, plan="sequential", backend="compile")
    assert len(said) == 1


@pytest.mark.parametrize("guidance", [0.0, jf.Guidance(weight=0.5, annealed=True, attn_temp=2.0)])
@pytest.mark.parametrize(
    ("plan", "shapes"),
    [
        ("sequential", 1),  # one position
        (jf.Plan((jf.Method(tol=1e-6),) * 3), 5),  # the rest of 15 positions, in buckets of 15, 8, 4, 2 and 1
        (jf.Plan((jf.Method(width=1), jf.Method(width=4, tol=1e-6), jf.Method(width=1))), 3),  # 1, 2, 4
    ],
    ids=["sequential", "whole", "windows"],
)
def test_the_same_answers_and_few_shapes(
    plan: Any, shapes: int, guidance: float | jf.Guidance, counter: CompileCounter
) -> None:
    flow = tarflow(0.2, num_classes=3, layers_per_block=1).double()
    assert flow.config.length == 16
    z, labels = flow.noise(3, seed=0), torch.tensor([0, 2, -1])
    options: dict[str, Any] = {"labels": labels, "guidance": guidance}
    want = flow.decode(z, plan, backend="torch", **options)
    found = flow.decode(z, plan, backend="compile", **options)
    torch.testing.assert_close(found.x, want.x, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(found.log_det, want.log_det, atol=1e-9, rtol=1e-9)
    for a, b in zip(found.stats.blocks, want.stats.blocks, strict=True):
        assert torch.equal(a.sweeps, b.sweeps)
    assert 1 <= counter.frame_count <= shapes
    before = counter.frame_count
    flow.decode(flow.noise(3, seed=1), plan, backend="compile", **options)
    assert counter.frame_count <= shapes  # other frontiers
    other = jf.Guidance(weight=0.7, attn_temp=1.5) if guidance else 0.0
    flow.decode(z, plan, backend="compile", labels=labels, guidance=other)
    assert counter.frame_count <= shapes  # another weight
    flow.decode(z[:2], plan, backend="compile", labels=labels[:2], guidance=guidance)
    assert counter.frame_count > before  # another number of rows


def test_more_flows_than_torch_compiles_of_one_function(counter: CompileCounter) -> None:
    for size in range(1, 11):
        flow = tarflow(0.2, width=16 * size, blocks=1, layers_per_block=1, image_size=4)
        flow.sample(1, plan="sequential", seed=0, backend="compile")
    assert counter.frame_count == 10


@pytest.mark.parametrize(
    ("name", "width"), [("tarflow-labels", None), ("tarflow-shift-guided", None), ("tarflow-shift-guided", 3)]
)
def test_rows_that_are_solved_stay(name: str, width: int | None, counter: CompileCounter) -> None:
    """Rows that end at different sweeps leave no batch of another size to be compiled."""
    one: Subject = subject(name)
    z = one.flow.noise(6, seed=3)
    z[::2] *= 0.1  # these are solved after another number of sweeps
    plan = jf.Plan((jf.Method(width=width, tol=1e-3),) * 3)
    rows: set[int] = set()
    params = compile.StaticConditioner.params

    def spy(self: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.add(len(x))
        return params(self, x, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compile.StaticConditioner, "params", spy)
        found = one.decode(z, plan, backend="compile")
    want = one.decode(z, plan, backend="torch")
    assert any(len(b.sweeps.unique()) > 1 for b in want.stats.blocks)
    torch.testing.assert_close(found.x, want.x, atol=1e-9, rtol=1e-9)
    assert len(rows) == 1
    assert [b.status for b in found.stats.blocks] == [b.status for b in want.stats.blocks]


def test_without_a_cache_and_with_gradients(counter: CompileCounter) -> None:
    flow = tarflow(0.2).double()
    z = flow.noise(2, seed=0)
    want = flow.decode(z, "selective", tol=1e-9, backend="torch")
    options: dict[str, Any] = {"tol": 1e-9, "backend": "compile"}
    torch.testing.assert_close(flow.decode(z, "selective", cache=False, **options).x, want.x)
    assert counter.frame_count
    flow.decode(z, "selective", differentiable=True, **options).x.sum().backward()
    grad = flow.blocks[0].proj_in.weight.grad.clone()
    flow.zero_grad()
    flow.decode(z, "selective", tol=1e-9, differentiable=True, backend="torch").x.sum().backward()
    torch.testing.assert_close(grad, flow.blocks[0].proj_in.weight.grad)


def test_changed_weights_count(counter: CompileCounter) -> None:
    """Compiled code has no copy of the weights."""
    flow = tarflow(0.2)
    z = flow.noise(2, seed=0)
    flow.decode(z, "sequential", backend="compile")
    with torch.no_grad():
        flow.blocks[1].proj_out.weight.mul_(1.5)
    found, want = (flow.decode(z, "sequential", backend=b).x for b in ("compile", "torch"))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("plan", ["uniform", jf.Plan((jf.Method(width=3, tol=1e-5),) * 3)])
def test_a_row_that_overflows_is_alone(plan: Any, counter: CompileCounter) -> None:
    flow = tarflow(0.2).float()
    z = flow.noise(3, seed=0)
    z[1, 4] = float("nan")
    z[2, 9] = 1e30
    options: dict[str, Any] = {"warn": False} | ({"tol": 1e-5} if plan == "uniform" else {})
    found = flow.decode(z, plan, backend="compile", **options)
    want = flow.decode(z, plan, backend="torch", **options)
    assert [b.status for b in found.stats.blocks] == [b.status for b in want.stats.blocks]
    torch.testing.assert_close(found.x, want.x, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_cuda_takes_graphs() -> None:
    assert compile.options("cuda") == {"mode": "reduce-overhead"}
    assert compile.options("cpu") == {}


def test_other_flows_are_declined() -> None:
    with pytest.raises(ValueError, match="does not support") as caught:
        maf(0.5).sample(2, backend="compile")
    assert str(caught.value) == "backend 'compile' does not support this flow here: leave it out"


@dataclass(frozen=True)
class Other(TransformerConditioner):
    """A subclass, which may do what cannot be compiled."""


def test_subclasses_are_declined() -> None:
    flow = tarflow(0.2)
    weights: Any = flow.blocks[0]
    bijector = weights.bijector
    assert bind(TransformerConditioner(weights), bijector, None, "compile").engine.name == "compile"
    guide = jf.Guidance(weight=1.0, attn_temp=2.0)
    for other in (
        Other(weights),
        TransformerConditioner(weights, skip=1),
        Guided(Other(weights), 2, flow.config.dim, guide),
    ):
        with pytest.raises(ValueError, match="does not support this flow"):
            bind(other, bijector, None, "compile")
