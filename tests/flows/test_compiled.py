"""compile=True: the same answers, and one compilation a shape, whatever the positions and blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import jacobiflow as jf
from jacobiflow.flows import compiled
from subjects import maf, tarflow


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounter]:
    """Counts what would be compiled, and runs it as it is: nothing here waits for a C++ compiler."""
    count = CompileCounter()
    torch.compiler.reset()
    compiled.compiled.cache_clear()
    monkeypatch.setattr(compiled, "options", lambda device: {"backend": count})
    yield count
    compiled.compiled.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize("guidance", [0.0, jf.Guidance(weight=0.5, annealed=True, attn_temp=2.0)])
@pytest.mark.parametrize(
    ("plan", "shapes"),
    [
        ("sequential", 1),  # one position
        (jf.Plan((jf.Method(tol=1e-6),) * 3), 5),  # 15 positions as they settle, in 15, 8, 4, 2 and 1
        (jf.Plan((jf.Method(width=1), jf.Method(width=4, tol=1e-6), jf.Method(width=1))), 3),  # 1, 2, 4
    ],
)
def test_the_same_answers_and_few_shapes(
    plan: Any, shapes: int, guidance: float | jf.Guidance, counter: CompileCounter
) -> None:
    flow = tarflow(0.2, num_classes=3).double()
    assert flow.config.length == 16
    z, labels = flow.noise(3, seed=0), torch.tensor([0, 2, -1])
    options: dict[str, Any] = {"labels": labels, "guidance": guidance}
    want = flow.decode(z, plan, **options)
    found = flow.decode(z, plan, compile=True, check=True, **options)
    torch.testing.assert_close(found.x, want.x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found.log_det, want.log_det, atol=1e-4, rtol=1e-5)
    twins = 2 if guidance else 1  # labels of each row, or one for all
    assert twins <= counter.frame_count <= shapes * twins
    before = counter.frame_count
    flow.decode(flow.noise(3, seed=1), plan, compile=True, **options)
    assert counter.frame_count == before
    flow.decode(z[:2], plan, compile=True, labels=labels[:2], guidance=guidance)
    assert counter.frame_count > before  # another batch size is another shape


def test_without_a_cache_and_with_gradients(counter: CompileCounter) -> None:
    flow = tarflow(0.2).double()
    z = flow.noise(2, seed=0)
    want = flow.decode(z, "selective", tol=1e-9)
    torch.testing.assert_close(flow.decode(z, "selective", tol=1e-9, compile=True, cache=False).x, want.x)
    flow.decode(z, "selective", tol=1e-9, compile=True, differentiable=True).x.sum().backward()
    grad = flow.blocks[0].proj_in.weight.grad.clone()
    flow.zero_grad()
    flow.decode(z, "selective", tol=1e-9, differentiable=True).x.sum().backward()
    torch.testing.assert_close(grad, flow.blocks[0].proj_in.weight.grad)
    assert counter.frame_count


def test_a_row_that_overflows_is_alone(counter: CompileCounter) -> None:
    flow = tarflow(0.2).float()
    z = flow.noise(3, seed=0)
    z[1, 4] = float("nan")
    found = flow.decode(z, "uniform", tol=1e-5, compile=True, warn=False)
    want = flow.decode(z, "uniform", tol=1e-5, warn=False)
    assert [s.name for s in found.stats.blocks[0].status] == [s.name for s in want.stats.blocks[0].status]
    torch.testing.assert_close(found.x, want.x, atol=1e-4, rtol=1e-4, equal_nan=True)


def test_cuda_takes_graphs() -> None:
    assert compiled.options("cuda") == {"mode": "reduce-overhead"}
    assert compiled.options("cpu") == {}


def test_other_flows_refuse() -> None:
    with pytest.raises(ValueError, match="compile=True is for TarFlow"):
        maf(0.5).sample(2, compile=True)
