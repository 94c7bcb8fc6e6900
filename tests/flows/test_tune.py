"""`tune`: candidates race on fresh noise; the fastest one within the bound is the plan."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jacobiflow as jf
from jacobiflow.flows import tune as tuner
from subjects import maf, tarflow


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))


def small(**options: Any) -> jf.Flow:
    return tarflow(0.25, num_classes=3, blocks=2, **options).float().eval().requires_grad_(False)


@pytest.fixture(autouse=True)
def _few_noises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacobiflow.flows.profile.NOISES", 16)


def counting(flow: jf.Flow, position: float, call: float) -> Any:
    """A clock that charges for work: a call, and every position of sequential decoding."""
    now = [0.0]

    class Engine:
        """The engine of a block, with a bill."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def select(self, rows: torch.Tensor) -> Engine:
            return Engine(self.inner.select(rows))

        def params(self, *args: Any) -> torch.Tensor:
            now[0] += call
            return self.inner.params(*args)

        def solve(self, x: Any, z: Any, slope: Any, start: int, stop: int, cache: Any) -> None:
            now[0] += position * (stop - start)
            self.inner.solve(x, z, slope, start, stop, cache)

    bound = flow.bound_blocks

    def charged(*args: Any, **options: Any) -> list[jf.Block]:
        from dataclasses import replace

        return [replace(b, engine=Engine(b.engine)) for b in bound(*args, **options)]

    flow.bound_blocks = charged  # type: ignore[method-assign]
    return lambda: now[0]


def test_sweeps_win_where_calls_are_cheap() -> None:
    flow = small()
    plan = jf.tune(flow, 4, 0.05, clock=counting(flow, position=1.0, call=0.5))
    assert any(m.width != 1 for m in plan)
    measured = plan.about["measured"]
    assert measured["speedup"] > 1.5
    assert measured["deviation"] <= 0.05
    assert measured["rows"] == 64


def test_sequential_decoding_wins_where_calls_are_dear() -> None:
    flow = small()
    plan = jf.tune(flow, 4, 0.05, clock=counting(flow, position=1.0, call=20.0))
    assert [m.width for m in plan] == [1, 1]
    assert plan.about["measured"]["speedup"] == 1.0
    assert plan.about["measured"]["deviation"] == 0.0


def test_the_plan_keeps_its_deviation_on_fresh_noise() -> None:
    flow = small()
    for bound in (0.2, 0.01):
        plan = jf.tune(flow, 4, bound, clock=counting(flow, position=1.0, call=0.1))
        z = flow.noise(64, seed=77)
        off = (flow.decode(z, plan).x - flow.decode(z, "sequential").x).abs().max().item()
        assert off <= bound


def test_what_was_tried_stands_in_the_plan() -> None:
    flow = small()
    plan = jf.tune(flow, 2, clock=counting(flow, position=1.0, call=0.5))
    tried = plan.about["tried"]
    assert [m["width"] for m in tried[0]["methods"]] == [1, 1]
    assert len(tried) > 4
    assert {m["init"] for t in tried for m in t["methods"] if m["width"] != 1} >= {"calibrated", "zeros"}
    timed = [t for t in tried if t["seconds"] is not None]
    assert min(timed, key=lambda t: t["seconds"])["methods"] == [
        {f: getattr(m, f) for f in ("width", "tol", "max_sweeps", "init", "unit", "precision")} for m in plan
    ]
    assert jf.Plan.from_json(plan.to_json()).about == plan.about


def test_auto_uses_the_profile_from_now_on() -> None:
    flow = small()
    assert flow.profile is None
    jf.tune(flow, 2)
    assert flow.profile is not None
    assert flow.calibration is not None
    again = small()
    assert tuner.entry_of(again, jf.Guidance()) == flow.profile.entries[0]


def test_labels_and_context_are_used_in_turn() -> None:
    plan = jf.tune(small(), 4, labels=torch.tensor([0, 2]))
    assert len(plan) == 2
    flow = maf(1.0, context=2, blocks=2).float()
    plan = jf.tune(flow, 4, context=torch.randn(3, 2))
    assert flow.profile is not None
    assert plan.about["measured"]["rows"] == 64


@pytest.mark.parametrize("labels", [[0, 2], range(0, 3, 2), np.array([0, 2])])
def test_labels_are_taken_in_turn(labels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, seen = small(), list[Any]()
    bound_blocks = flow.bound_blocks
    monkeypatch.setattr(flow, "bound_blocks", lambda n, **o: (seen.append(o["labels"]), bound_blocks(n, **o))[1])
    jf.tune(flow, 2, labels=labels)
    assert torch.equal(seen[0], torch.tensor([0, 2]).repeat(32))


def test_guidance_is_measured_by_itself() -> None:
    flow = small()
    jf.tune(flow, 2, labels=1, guidance=1.5)
    assert flow.profile is not None
    assert [e.guidance.weight for e in flow.profile.entries] == [1.5]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"max_deviation": 0}, "max_deviation must be positive"),
        ({"labels": 7}, "labels must be 0 .. 2"),
        ({"labels": [0, 7]}, "labels must be 0 .. 2, or -1 for none, not 7"),
        ({"labels": [0.5]}, "labels must be a whole number"),
        ({"labels": []}, "there are 0 labels for 64 samples"),
    ],
)
def test_bad_arguments_are_found_before_any_work(
    given: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "calibrate", lambda *_, **__: pytest.fail("work was done"))
    with pytest.raises(ValueError, match=match):
        jf.tune(small(), **given)


def test_what_progress_raises_ends_the_tuning() -> None:
    class Stop(Exception):
        pass

    counter = itertools.count()

    def progress(_: str) -> None:
        if next(counter) == 3:
            raise Stop

    with pytest.raises(Stop):
        jf.tune(small(), 2, progress=progress)
