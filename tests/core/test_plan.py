from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jacobiflow as jf
from subjects import subject

METHODS = st.builds(
    jf.Method,
    width=st.none() | st.integers(1, 10_000),
    tol=st.floats(0, 1e6),
    max_sweeps=st.none() | st.integers(1, 10_000),
    init=st.sampled_from(["zeros", "noise", "previous"]),
)


@given(st.lists(METHODS, max_size=12))
def test_json_round_trip(methods: list[jf.Method]) -> None:
    plan = jf.Plan(tuple(methods), about={"batch": 16})
    again = jf.Plan.from_json(plan.to_json())
    assert again == plan
    assert again.about == {"batch": 16}
    assert hash(again) == hash(plan)


def test_named_plans() -> None:
    assert [m.width for m in jf.Plan.sequential(3)] == [1, 1, 1]
    assert [m.width for m in jf.Plan.selective(3, tol=0.5)] == [1, None, None]
    assert [m.tol for m in jf.Plan.selective(3, tol=0.5)] == [0.0, 0.5, 0.5]
    assert [m.width for m in jf.Plan.uniform(2, tol=0.1)] == [None, None]
    assert len(jf.Plan.selective(1, tol=0.5)) == 1
    tarflow, maf = subject("tarflow").flow, subject("maf-exp").flow
    assert tarflow.plan("selective") == jf.Plan.selective(3, tol=0.5, init=tarflow.default_init)
    assert maf.plan("selective") == jf.Plan.uniform(3, tol=1e-4, init=maf.default_init)
    assert maf.plan("uniform", tol=0.1, init="zeros") == jf.Plan.uniform(3, tol=0.1, init="zeros")


def test_save_and_load(tmp_path: Path) -> None:
    flow = subject("tarflow").flow
    plan = jf.Plan((jf.Method(width=1), jf.Method(width=4, tol=1e-3), jf.Method(tol=0.5, init="zeros")))
    plan.save(tmp_path / "plan.json")
    assert jf.Plan.load(tmp_path / "plan.json") == plan
    z = flow.noise(3, seed=0)
    assert (flow.decode(z, str(tmp_path / "plan.json")).x == flow.decode(z, plan).x).all()
    assert (flow.decode(z, tmp_path / "plan.json").x == flow.decode(z, plan).x).all()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "must be JSON"),
        ("[]", '"format": "jacobiflow-plan"'),
        ('{"format": "other"}', '"format": "jacobiflow-plan"'),
        ("[" * 100_000, "must be JSON"),
        (json.dumps({"format": "jacobiflow-plan", "version": 2}), "version 1"),
        (json.dumps({"format": "jacobiflow-plan", "version": 1}), 'list "methods"'),
        (json.dumps({"format": "jacobiflow-plan", "version": 1, "methods": [1]}), r"methods\[0\]"),
        (json.dumps({"format": "jacobiflow-plan", "version": 1, "methods": [{"w": 1}]}), r"methods\[0\]"),
        (json.dumps({"format": "jacobiflow-plan", "version": 1, "methods": [{"tol": -1}]}), "tol"),
        (json.dumps({"format": "jacobiflow-plan", "version": 1, "methods": [{"width": "9"}]}), "width"),
    ],
)
def test_a_damaged_plan_is_one_clear_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(jf.PlanError, match=says) as caught:
        jf.Plan.load(tmp_path / "p.json")
    assert "\n" not in str(caught.value)
    assert "p.json" in str(caught.value)


def test_plans_that_do_not_fit() -> None:
    flow = subject("tarflow").flow
    z = flow.noise(1, seed=0)
    with pytest.raises(jf.PlanError, match="2 methods, the flow 3 blocks"):
        flow.decode(z, jf.Plan.sequential(2))
    with pytest.raises(TypeError, match="tol"):
        flow.decode(z, jf.Plan.sequential(3), tol=0.5)
    with pytest.raises(TypeError, match="tol"):
        flow.decode(z, "sequential", tol=0.5)
    with pytest.raises(jf.PlanError, match="no plan is called 'quick'"):
        flow.decode(z, "quick")
    with pytest.raises(jf.PlanError, match=r"cannot read the plan .*missing\.json"):
        flow.decode(z, "missing.json")
    with pytest.raises(jf.PlanError, match="entry 0"):
        jf.Plan((1,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init must be one of"):
        flow.decode(z, "uniform", init="ones")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        flow.decode(z, "uniform", tolerance=0.5)  # type: ignore[call-arg]
