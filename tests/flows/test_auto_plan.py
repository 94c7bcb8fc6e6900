"""plan="auto": the fastest plan that profile and costs predict, within the deviation that was asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow.flows import cost_model, plans
from jacobiflow.flows.calibration import calibrate
from jacobiflow.flows.cost_model import Costs, measure
from jacobiflow.flows.plans import Choice, entry_of, keep, pick
from jacobiflow.flows.profile import Cell, Entry, Profile, measure_profile
from subjects import maf, tarflow

EXACT = jf.Method(width=1, unit="absolute")


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))


def small() -> jf.Flow:
    return tarflow(0.25, num_classes=3, blocks=2).float().eval().requires_grad_(False)


def cell(width: int | None, tol: float, sweeps: int, deviation: float) -> Cell:
    return Cell(width=width, tol=tol, init="previous", unit="absolute", sweeps=(sweeps,) * 4, deviation=deviation)


def profiled(flow: jf.Flow, *cells: Cell) -> jf.Flow:
    """A flow with the same profile in every block."""
    entry = Entry(guidance=jf.Guidance(), noises=4, blocks=(cells,) * len(flow.blocks))
    flow.profile = Profile(weights=flow.fingerprint(), entries=(entry,))
    return flow


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what a position and a sweep cost."""

    def give(position: float, sweep: float, rough: float = 0.0) -> None:
        def of(block: jf.Block, z: torch.Tensor, **_: Any) -> Costs:
            sweeps = (sweep,) * 2
            sizes = {"rows": len(z), "length": 16, "widths": (8, 16)}
            return Costs(position=position, alone=sweeps, together=sweeps, rough=rough, **sizes)

        monkeypatch.setattr(plans, "costs_of", of)

    return give


def test_it_is_the_default(costs: Callable[..., None]) -> None:
    costs(position=1.0, sweep=1.0)
    flow = profiled(small(), cell(None, 0.1, 3, 0.01))
    want = jf.Plan((jf.Method(tol=0.1, init="previous", unit="absolute"),) * 2)
    assert flow.sample(3, seed=0).stats.plan == flow.sample(3, plan="auto", seed=0).stats.plan == want
    assert flow.decode(flow.noise(1, seed=0)).stats.plan == want
    assert flow.sample(3, tol=0.2, seed=0).stats.plan == flow.plan("selective", tol=0.2)


def test_sequential_decoding_stays_where_sweeps_cost_more(costs: Callable[..., None]) -> None:
    costs(position=1.0, sweep=15 / 3)
    flow = profiled(small(), cell(None, 0.1, 3, 0.01))
    assert flow.plan() == jf.Plan((EXACT,) * 2)
    costs(position=1.0, sweep=4.0)
    flow.auto_plans.clear()
    assert [m.width for m in flow.plan()] == [None, None]


def test_the_deviations_of_all_blocks_stay_within_the_bound(costs: Callable[..., None]) -> None:
    costs(position=1.0, sweep=1.0)
    flow = profiled(small(), cell(None, 0.5, 2, 0.03), cell(None, 0.1, 4, 0.008))
    assert [m.tol for m in flow.plan()] == [0.5, 0.1] or [m.tol for m in flow.plan()] == [0.1, 0.5]
    assert [m.tol for m in flow.plan(max_deviation=0.1)] == [0.5, 0.5]
    assert [m.tol for m in flow.plan(max_deviation=0.021)] == [0.1, 0.1]
    assert flow.plan(max_deviation=0.001) == jf.Plan((EXACT,) * 2)


def test_the_costs_decide_on_mixed_precision(costs: Callable[..., None]) -> None:
    """4 sweeps in float32, or 4 in bfloat16 and one in float32."""
    mixed = replace(cell(None, 0.1, 1, 0.01), precision="mixed", guess_sweeps=(4,) * 4)
    flow = profiled(small(), cell(None, 0.1, 4, 0.01), mixed)
    for rough, want in ((0.7, "mixed"), (0.8, "float32"), (0.0, "float32")):  # 0: there is none
        costs(position=1.0, sweep=1.0, rough=rough)
        flow.auto_plans.clear()
        assert [m.precision for m in flow.plan()] == [want] * 2


def test_a_measured_plan_keeps_its_deviation() -> None:
    """The whole way: guesses, profile, costs of this machine, samples."""
    flow = small()
    calibrate(flow, noises=100)
    measure_profile(flow, noises=32)
    z, labels = flow.noise(64, seed=3), torch.arange(64) % 3
    exact = flow.decode(z, "sequential", labels=labels).x
    for bound in (0.2, 0.02):
        out = flow.decode(z, labels=labels, max_deviation=bound)
        assert (out.x - exact).abs().max() <= bound


def test_without_a_profile_it_is_sequential_on_a_cpu() -> None:
    assert small().sample(2).stats.plan == jf.Plan((EXACT,) * 2)
    assert maf(1.0, context=2).plan() == jf.Plan.sequential(3).resolved("relative")


def test_without_a_profile_it_is_near_exact_on_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = small()
    meta = small().to("meta")
    monkeypatch.setattr(flow, "parameters", lambda: meta.parameters())
    monkeypatch.setattr(flow, "noise", lambda n, seed: torch.zeros(n, *flow.latent_shape))
    plan = plans.default_plan(flow)
    assert plan == jf.Plan((jf.Method(width=64, tol=1e-4), jf.Method(tol=0.01, max_sweeps=2)))


def test_guidance_that_was_not_measured_counts_as_no_profile(costs: Callable[..., None]) -> None:
    costs(position=1.0, sweep=1.0)
    flow = profiled(small(), cell(None, 0.1, 3, 0.01))
    out = flow.sample(2, labels=1, guidance=1.0, seed=0)
    assert out.stats.plan == jf.Plan((EXACT,) * 2)


@pytest.mark.parametrize("bound", [0.0, -1.0, float("inf"), float("nan"), "0.1", True])
def test_a_deviation_is_a_positive_number(bound: Any, costs: Callable[..., None]) -> None:
    flow = profiled(small(), cell(None, 0.1, 3, 0.01))
    with pytest.raises(ValueError, match="max_deviation must be positive"):
        flow.sample(1, max_deviation=bound)


@pytest.mark.parametrize("given", [{"plan": "selective"}, {"plan": "sequential"}, {"tol": 0.1}, {"init": "zeros"}])
def test_a_deviation_belongs_to_auto(given: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="max_deviation belongs to plan 'auto'"):
        small().sample(1, max_deviation=0.1, **given)


def test_a_stored_profile_is_found_again() -> None:
    flow = profiled(small(), cell(None, 0.1, 3, 0.01))
    assert flow.profile is not None
    folder = keep(flow)
    assert folder is not None
    again = small()
    found = entry_of(again, jf.Guidance())
    assert found == flow.profile.entries[0]
    (folder / "profile.json").write_text("{}")
    assert entry_of(small(), jf.Guidance()) is None


def test_pick_spends_the_deviation_where_it_gains_most() -> None:
    fast, slow = jf.Method(tol=0.1), jf.Method(width=1)
    rows = [
        [Choice(fast, 9.0, 0.05), Choice(slow, 10.0, 0.0)],
        [Choice(fast, 1.0, 0.05), Choice(slow, 10.0, 0.0)],
    ]
    assert [m.width for m in pick(rows, 0.06)] == [1, None]
    assert [m.width for m in pick(rows, 0.1)] == [None, None]
    assert [m.width for m in pick(rows, 0.01)] == [1, 1]


@pytest.mark.parametrize(("seconds", "width"), [(0.97, 1), (0.91, 1), (0.9, None), (0.5, None)])
def test_a_slight_gain_is_none(seconds: float, width: int | None) -> None:
    """Sequential decoding stays within 0.9x of any plan that it is preferred to."""
    rows = [[Choice(jf.Method(tol=0.1), seconds, 0.0), Choice(jf.Method(width=1), 1.0, 0.0)]]
    assert pick(rows, 0.1)[0].width == width


def test_costs_of_rows_that_leave() -> None:
    """Two samples of four need two sweeps more: those cost as much as two rows."""
    sizes = {"rows": 4, "length": 9, "widths": (8, 9)}
    costs = Costs(position=0.5, alone=(1.0, 1.0), together=(4.0, 4.0), **sizes)
    assert costs.swept(None, (3, 3, 3, 3), 4) == pytest.approx(12.0)
    assert costs.swept(8, (1, 1, 1, 1), 8) == pytest.approx(8.0)
    assert 4.0 + 2 * 1.8 < costs.swept(None, (1, 1, 3, 3), 4) < 4.0 + 2 * 2.2
    assert costs.sequential(8) == pytest.approx(0.5 * 8 * 2)
    assert replace(costs, rough=2.0).swept(None, (3,) * 4, 4, guess=(1, 2, 2, 3)) == pytest.approx(12 + 2 * 2)


def test_costs_are_measured_with_the_clock_that_is_given() -> None:
    flow, now = small(), [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    z = flow.to_prior(flow.noise(3, seed=0))
    found = measure(flow.bound_blocks(3)[0], z, clock)
    assert (found.rows, found.length, found.widths) == (3, 16, (8, 16))
    assert found.position == 1 / 8
    assert found.together[0] == 1.0
    assert found.together[1] == 2.0  # extrapolated: the clock says that time has run out
    assert found.rough == (0.0 if flow.bound_blocks(1)[0].engine.rough() is None else 1.0)


def test_costs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))
    monkeypatch.setattr(cost_model, "_known", {})
    monkeypatch.setattr(cost_model, "busy_elsewhere", lambda: 0.0)
    flow = small()
    block, z = flow.bound_blocks(2)[0], flow.to_prior(flow.noise(2, seed=0))
    first = cost_model.costs_of(block, z)
    (path,) = (tmp_path / "costs").iterdir()
    monkeypatch.setattr(cost_model, "_known", {})
    monkeypatch.setattr(cost_model, "measure", lambda *_: pytest.fail("measured again"))
    assert cost_model.costs_of(block, z) == first
    assert json.loads(path.read_text())["rows"] == 2


def test_costs_are_of_a_number_of_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cost_model, "_known", {})
    flow, before = profiled(small(), cell(None, 0.1, 3, 0.01)), torch.get_num_threads()
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            flow.auto_plans.clear()
            flow.plan(n=2)
    finally:
        torch.set_num_threads(before)
    assert len(list((tmp_path / "costs").iterdir())) == 2


def test_a_short_disturbance_spoils_no_cost() -> None:
    """What is timed first takes six times as long."""
    flow, now, reads = small(), [0.0], [0]
    z = flow.to_prior(flow.noise(3, seed=0))
    block = flow.bound_blocks(3)[0]

    def clock() -> float:
        reads[0] += 1
        now[0] += 0.05 if reads[0] < 12 else 2**-7
        return now[0]

    found = measure(block, z, clock)
    assert found.position == 2**-7 / 8
    assert found.together == found.alone == (2**-7, 2**-7)


def test_crowded_costs_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By later processes, a few times; the lesser figures count."""
    flow, costs, made = small(), list[float](), list[float]()
    block, z = flow.bound_blocks(2)[0], flow.to_prior(flow.noise(2, seed=0))
    busy = iter([0.0, 1e6] * 10)
    monkeypatch.setattr(cost_model, "busy_elsewhere", lambda: next(busy))
    crowded = measure(block, z)
    assert crowded.again == cost_model.AGAIN

    def process(position: float, again: int) -> float:
        monkeypatch.setattr(cost_model, "_known", {})
        new = replace(crowded, position=position, again=again)
        monkeypatch.setattr(cost_model, "measure", lambda *_: made.append(position) or new)
        return cost_model.costs_of(block, z).position

    costs = [process(position, again) for position, again in ((3.0, 4), (5.0, 4), (2.0, 0), (1.0, 0))]
    assert costs == [3.0, 3.0, 2.0, 2.0]  # the third was quiet
    assert made == [3.0, 5.0, 2.0]
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(Path(str(cost_model.own_folder("costs"))) / "other"))
    for _ in range(9):
        process(1.0, 4)
    assert len(made) == 3 + 1 + cost_model.AGAIN


def test_measuring_costs_changes_no_sample() -> None:
    flow = profiled(small(), cell(None, 0.0, 3, 0.01))
    z = flow.noise(3, seed=0)
    before = flow.decode(z, "sequential").x
    flow.plan(n=3)
    assert torch.equal(flow.decode(z, "sequential").x, before)


def test_a_call_in_parts_has_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def of(flow: jf.Flow, n: int, **_: Any) -> jf.Plan:
        asked.append(n)
        return jf.Plan.sequential(len(flow.blocks))

    monkeypatch.setattr("jacobiflow.flows.plans.auto_plan", of)
    assert len(small().sample(7, batch_size=3, seed=0).x) == 7
    small().sample(2, batch_size=3, seed=0)
    assert asked == [3, 2]
