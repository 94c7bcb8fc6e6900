"""Tuning, by a clock that only blocks move: what is chosen follows from what things cost."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core import tune as core
from jacobiflow.core.block import Cache, Start
from jacobiflow.core.tune import deviation, tune
from jacobiflow.kernels.torch_reference import TorchEngine
from subjects import subject

BOUND = 0.05


@dataclass
class Clock:
    """Seconds that blocks have spent; `pause` is added when the clock is read for the `at`-th time."""

    now: float = 0.0
    reads: int = 0
    at: int = -1
    pause: float = 0.0

    def __call__(self) -> float:
        self.reads += 1
        self.now += self.pause if self.reads == self.at else 0.0
        return self.now


@dataclass(frozen=True)
class Priced(TorchEngine):
    """An engine whose every evaluation costs `call` seconds and `position` seconds per position and row."""

    clock: Clock = field(default_factory=Clock, repr=False)
    call: float = 0.0
    position: float = 0.0

    def params(self, x: Tensor, start: Start, width: int, cache: Cache | None) -> Tensor:
        inputs = x.shape[1] - 1 if cache is None else width
        self.clock.now += self.call + self.position * len(x) * inputs
        return super().params(x, start, width, cache)


SEQUENTIAL = jf.Plan.sequential(3)
CALLS, POSITIONS = (1e-3, 1e-7), (1e-7, 1e-3)  # what is dear


@dataclass
class Bench:
    """A subject with prices, and noise for it."""

    name: str = "tarflow-labels"
    prices: Sequence[tuple[float, float]] = (CALLS,) * 3
    rows: int = 20
    batch: int = 4
    fresh: float = 1.0  # the size of the second half's noise
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.subject = subject(self.name)
        self.z = self.subject.flow.to_prior(self.subject.flow.noise(2 * self.rows, seed=1))
        self.z[self.rows :] *= self.fresh

    def stack(self, n: int) -> list[jf.Block]:
        blocks = self.subject.flow.bound_blocks(
            n, guidance=self.subject.guidance, **self.subject.condition(n)
        )
        return [
            replace(
                b, engine=Priced(b.conditioner, b.bijector, clock=self.clock, call=call, position=position)
            )
            for b, (call, position) in zip(blocks, self.prices, strict=True)
        ]

    def tune(self, bound: float = BOUND, **options: Any) -> jf.Plan:
        stack = self.stack(2 * self.rows)
        return tune(stack, self.z, batch=self.batch, max_deviation=bound, clock=self.clock, **options)

    def solve(self, plan: jf.Plan, begin: int, end: int) -> tuple[Tensor, float]:
        """The answers of these rows, and what they cost."""
        began, seq = self.clock.now, self.z[begin:end]
        rows = torch.arange(begin, end)
        for method, block in zip(plan, self.stack(2 * self.rows), strict=True):
            seq = jf.decode(block.select(rows), seq, method).x
        return seq, self.clock.now - began

    @cached_property
    def exact(self) -> Tensor:
        return self.solve(SEQUENTIAL, 0, 2 * self.rows)[0]

    def deviation(self, plan: jf.Plan) -> float:
        return float((self.solve(plan, 0, 2 * self.rows)[0] - self.exact).abs().max())

    def seconds(self, plan: jf.Plan) -> float:
        """Of a batch, over the fresh half."""
        batches = range(self.rows, 2 * self.rows, self.batch)
        return sum(self.solve(plan, i, i + self.batch)[1] for i in batches) / len(batches)


@pytest.mark.parametrize("name", ["tarflow-labels", "tarflow-guided", "maf-affine", "maf-context", "nsf"])
def test_sweeps_where_calls_are_dear(name: str) -> None:
    bench = Bench(name)
    plan = bench.tune()
    found = plan.about["measured"]
    assert all(method.width != 1 for method in plan)
    assert found["deviation"] == pytest.approx(bench.deviation(plan), abs=1e-12)
    assert 0 < found["deviation"] <= core.MARGIN * BOUND
    assert found["rows"] == 40
    assert found["speedup"] == pytest.approx(found["sequential_seconds"] / found["seconds"], rel=1e-6)
    assert found["speedup"] > 2
    assert found["sequential_seconds"] == pytest.approx(bench.seconds(SEQUENTIAL))
    assert found["seconds"] == pytest.approx(bench.seconds(plan), rel=0.15)
    assert found["predicted_speedup"] == pytest.approx(found["speedup"], rel=0.2)
    assert jf.Plan.from_json(plan.to_json()).about == plan.about


def test_sequential_where_positions_are_dear() -> None:
    bench = Bench(prices=(POSITIONS,) * 3)
    plan = bench.tune()
    assert plan == SEQUENTIAL
    found = plan.about["measured"]
    assert (found["speedup"], found["predicted_speedup"], found["deviation"]) == (1, 1, 0)
    for tried in plan.about["tried"]:  # a width that is too slow when loose is not tried tighter
        assert len({t["width"] for t in tried}) == len(tried)


@pytest.mark.parametrize("hard", [0, 1, 2])
def test_each_block_by_its_own_price(hard: int) -> None:
    prices = [CALLS] * 3
    prices[hard] = (POSITIONS[0], 1e-4)
    plan = Bench(prices=prices).tune()
    assert [method.width == 1 for method in plan] == [i == hard for i in range(3)]


@pytest.mark.parametrize(
    ("name", "price"),
    [
        ("tarflow-labels", (1e-3, 2e-4)),
        ("maf-affine", (1e-3, 2e-5)),
        ("maf-affine", (1e-3, 2e-4)),
        ("maf-affine", (1e-3, 1e-3)),
    ],
)
def test_nothing_fixed_is_much_faster(name: str, price: tuple[float, float]) -> None:
    bench = Bench(name, prices=(price,) * 3)
    plan = bench.tune()
    seconds = bench.seconds(plan)
    assert seconds <= bench.seconds(SEQUENTIAL)
    for width in (None, 8):
        for tol in (0.5, 0.05, 0.005):
            for first in (1, width):
                rest = jf.Method(width=width, tol=tol)
                fixed = jf.Plan((jf.Method(width=first, tol=tol if first != 1 else 0), rest, rest))
                if bench.deviation(fixed) <= core.MARGIN * BOUND:
                    assert seconds <= bench.seconds(fixed) / 0.9


def test_a_tighter_bound_is_kept_and_costs_more() -> None:
    bench, last = Bench("maf-affine"), 0.0
    for bound in (1.0, 0.1, 1e-2, 1e-4, 1e-8):
        plan = bench.tune(bound)
        assert bench.deviation(plan) <= bound
        seconds = bench.seconds(plan)
        assert seconds >= 0.95 * last
        last = seconds


def test_fresh_noise_has_the_last_word() -> None:
    bold, bench = Bench("maf-affine").tune(), Bench("maf-affine", fresh=4.0)
    assert bench.deviation(bold) > BOUND
    assert bench.deviation(bench.tune()) <= core.MARGIN * BOUND


def uniform(tol: float) -> jf.Plan:
    return jf.Plan.uniform(3, tol=tol)


def test_rivals_win_what_blocks_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks by themselves may mislead; the loosest rival that keeps the bound wins if it is faster."""
    monkeypatch.setattr(core, "WIDTHS", ())
    bench = Bench()
    ladder = [uniform(tol) for tol in (5.0, 0.5, 0.05, 0.005)]
    assert bench.tune() == SEQUENTIAL
    plan = bench.tune(rivals=[ladder])
    kept = [p for p in ladder if bench.deviation(p) <= core.MARGIN * BOUND]
    assert plan == kept[0] != ladder[0]
    found = plan.about["measured"]
    assert found["deviation"] == pytest.approx(bench.deviation(plan), abs=1e-12)
    assert found["seconds"] == pytest.approx(bench.seconds(plan), rel=0.15)
    assert found["predicted_speedup"] == pytest.approx(found["speedup"], rel=0.2)
    for method, tried in zip(plan, plan.about["tried"], strict=True):
        assert any(t["tol"] == method.tol and t["width"] == method.width for t in tried)


def test_slow_rivals_lose() -> None:
    bench = Bench(prices=(POSITIONS,) * 3)
    assert bench.tune(rivals=[[uniform(0.5), uniform(1e-6)]]) == SEQUENTIAL
    bench = Bench()
    assert bench.seconds(bench.tune(rivals=[[uniform(1e-9)]])) < bench.seconds(uniform(1e-9))


def test_a_pause_of_the_machine_changes_little() -> None:
    quiet = Bench("maf-affine").tune().about["measured"]["predicted_speedup"]
    for at in (2, 4, 8, 30):  # the first runs are those of sequential decoding
        plan = Bench("maf-affine", clock=Clock(at=at, pause=100.0)).tune()
        assert plan.about["measured"]["speedup"] > 0.7 * quiet


def test_the_same_measurements_give_the_same_plan() -> None:
    one, two = Bench("maf-affine").tune(), Bench("maf-affine").tune()
    assert one == two
    assert one.about == two.about


def test_samples_without_an_answer_do_not_count() -> None:
    bench = Bench("maf-affine")
    bench.z[[0, bench.rows], 3] = math.nan
    plan = bench.tune()
    assert all(method.width != 1 for method in plan)
    assert 0 < plan.about["measured"]["deviation"] <= core.MARGIN * BOUND
    json.dumps(plan.about, allow_nan=False)


def test_deviation() -> None:
    exact = torch.tensor([[[1.0], [2.0]], [[3.0], [math.inf]]])
    assert deviation(exact, exact) == 0
    assert deviation(exact + torch.tensor([[[0.5], [-1.0]], [[9.0], [9.0]]]), exact) == 1
    assert deviation(exact * math.nan, exact) == math.inf
    assert deviation(exact[1:], exact[1:]) == deviation(exact[:0], exact[:0]) == 0
