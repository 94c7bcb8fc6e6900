"""Mixed precision: sweeps in bfloat16 improve the first guess, and everything else is as in float32."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core import decode as loop
from jacobiflow.kernels import backend as backends
from subjects import maf, tarflow

TOL = 0.05
MIXED, PLAIN = jf.Method(tol=TOL, precision="mixed"), jf.Method(tol=TOL)
BACKENDS = ("c", "torch")


@pytest.fixture(autouse=True)
def _bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch computes in bfloat16 on every processor, if need be slowly."""
    monkeypatch.setattr(backends, "has_bfloat16", lambda device: True)


def flow_of(**options: Any) -> jf.TarFlow:
    options = {"num_classes": 3, "blocks": 2} | options
    return tarflow(0.25, **options).float().eval().requires_grad_(False)


def block_of(n: int, backend: str, **options: Any) -> tuple[jf.Block, Tensor]:
    flow = flow_of(**options)
    found = flow.bound_blocks(n, labels=torch.arange(n) % 3, backend=backend)[0]
    if found.engine.rough() is None:  # C, on a processor without the instructions
        found = flow.bound_blocks(n, labels=torch.arange(n) % 3, backend="torch")[0]
    return found, flow.noise(n, seed=3)


@pytest.mark.parametrize("options", [{}, {"width": 48, "head_dim": 24}, {"image_size": 10}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_rough_engine_is_the_engine_in_bfloat16(backend: str, options: dict[str, Any]) -> None:
    block, x = block_of(3, backend, **options)
    rough, width = block.engine.rough(), block.length - 1
    assert rough is not None
    exact = block.engine.params(x, 1, width, None)
    off = (rough.params(x, 1, width, None) - exact).abs().max()
    assert 2**-16 < off / exact.abs().max() < 2**-5  # bfloat16 has eight bits


@pytest.mark.parametrize("backend", BACKENDS)
def test_sweeps_in_bfloat16_replace_sweeps_in_float32(backend: str) -> None:
    block, z = block_of(6, backend)
    exact = jf.decode(block, z, jf.Method(width=1)).x
    mixed, plain = jf.decode(block, z, MIXED), jf.decode(block, z, PLAIN)
    ours, theirs = mixed.stats.blocks[0], plain.stats.blocks[0]
    assert (ours.precision, theirs.precision) == ("mixed", "float32")
    assert (ours.guess_sweeps > 0).all()
    assert (theirs.guess_sweeps == 0).all()
    assert (ours.sweeps < theirs.sweeps).all()
    assert (ours.sweeps * (block.length - 1) >= ours.evaluated).all()  # guesses are counted apart
    assert set(ours.status) == {jf.Status.CONVERGED}
    assert (mixed.x - exact).abs().max() < 4 * TOL
    assert ours.update.max() <= TOL
    one_more = block.sweep(mixed.x, z)[0]
    assert (one_more - mixed.x).abs().max() <= 2 * TOL  # answer = G(seen), |answer - seen| <= tol


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tolerance_is_the_exact_answer(backend: str) -> None:
    block, z = block_of(4, backend)
    out = jf.decode(block, z, jf.Method(precision="mixed"))
    assert set(out.stats.blocks[0].status) == {jf.Status.EXACT}
    assert (out.x - jf.decode(block, z, jf.Method(width=1)).x).abs().max() < 1e-4
    assert (out.stats.blocks[0].guess_sweeps > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_is_its_own(backend: str) -> None:
    block, z = block_of(7, backend)
    together = jf.decode(block, z, MIXED)
    for i in range(7):
        alone = jf.decode(block.select(torch.tensor([i])), z[i : i + 1], MIXED)
        assert (alone.x - together.x[i]).abs().max() < 1e-2  # roundings of bfloat16
        ours, theirs = alone.stats.blocks[0], together.stats.blocks[0]
        assert abs(int(ours.guess_sweeps) - int(theirs.guess_sweeps[i])) <= 1


def test_guesses_move_no_frontier_and_write_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    block, z = block_of(3, "torch")
    calls, engine = list[tuple[str, Any, Any]](), type(block.engine)
    params = engine.params

    def spy(self: Any, x: Tensor, start: Any, width: int, cache: Any) -> Tensor:
        kind = type(self.conditioner).__name__
        filled = None if cache is None else float(cache.k.abs().sum())
        calls.append((kind, start, filled))
        return params(self, x, start, width, cache)

    monkeypatch.setattr(engine, "params", spy)
    jf.decode(block, z, MIXED)
    rough = [call for call in calls if call[0] == "RoughConditioner"]
    assert rough
    assert calls[: len(rough)] == [("RoughConditioner", 1, None)] * len(rough)
    assert calls[len(rough)][1:] == (1, 0.0)  # float32 begins at the first position, with an empty cache


@pytest.mark.parametrize("why", ["processor", "float64", "masked network", "compiled"])
def test_what_has_no_bfloat16_runs_in_float32_and_says_so(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = {"masked network": "c", "compiled": "compile"}.get(why, "torch")
    flow: jf.Flow = maf(1.0).float() if why == "masked network" else flow_of()
    if why == "processor":
        monkeypatch.setattr(backends, "has_bfloat16", lambda device: False)
    flow = flow.double() if why == "float64" else flow
    z = flow.noise(2, seed=0)
    if why == "compiled":
        assert flow.bound_blocks(2, backend="compile")[0].engine.rough() is None
        return
    plans = [jf.Plan((method,) * len(flow.blocks)) for method in (MIXED, PLAIN)]
    mixed, plain = (flow.decode(z, plan, backend=backend) for plan in plans)
    assert (mixed.x == plain.x).all()
    for block in mixed.stats.blocks:
        assert block.precision == "float32"
        assert (block.guess_sweeps == 0).all()


def test_rows_that_overflow_keep_a_finite_guess() -> None:
    block, z = block_of(3, "torch")
    z[1, 2] = float("inf")
    out = jf.decode(block, z, MIXED)
    assert [s is jf.Status.NONFINITE for s in out.stats.blocks[0].status] == [False, True, False]
    huge = z.clone().nan_to_num(0, 0, 0)
    huge[2] = 3e38
    engine, method = block.engine.rough(), MIXED.resolved()
    assert engine is not None
    guess, _ = loop.rough_guess(engine, huge, huge[:, :1], torch.zeros_like(huge), method)
    assert guess.isfinite().all()


def test_batches_are_joined() -> None:
    out = flow_of().sample(5, seed=0, plan=jf.Plan((MIXED, PLAIN)), batch_size=2, backend="torch")
    assert [b.precision for b in out.stats.blocks] == ["mixed", "float32"]
    assert (out.stats.blocks[0].guess_sweeps > 0).tolist() == [True] * 5


def test_plans_keep_the_precision() -> None:
    plan = jf.Plan((MIXED, PLAIN))
    assert jf.Plan.from_json(plan.to_json()) == plan
    doc = json.loads(plan.to_json())
    for method in doc["methods"]:
        del method["precision"]  # as an earlier release wrote it
    assert jf.Plan.from_json(json.dumps(doc)).methods == (PLAIN, PLAIN)
    with pytest.raises(ValueError, match="must be one of float32, mixed, not 'half'"):
        jf.Method(precision="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="whole-sequence sweeps: leave out width"):
        jf.Method(width=8, precision="mixed")
