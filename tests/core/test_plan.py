from __future__ import annotations

import json
import re
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
    unit=st.sampled_from([None, "absolute", "relative"]),
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
    selective = jf.Plan.selective(3, tol=0.5, init="previous")
    assert tarflow.plan("selective") == selective.resolved("absolute")
    assert maf.plan("selective") == jf.Plan.uniform(3, tol=1e-4, init="zeros").resolved("relative")
    uniform = jf.Plan.uniform(3, tol=0.1, init="noise").resolved("relative")
    assert maf.plan("uniform", tol=0.1, init="noise") == uniform


@pytest.mark.parametrize(("name", "unit"), [("tarflow", "absolute"), ("maf-exp", "relative")])
def test_methods_without_a_unit_take_the_familys(name: str, unit: str, tmp_path: Path) -> None:
    """Those of plan files that were written before there were units, too."""
    flow = subject(name).flow
    plan = jf.Plan((jf.Method(width=1), jf.Method(tol=0.1), jf.Method(tol=0.1, unit="absolute")))
    doc = json.loads(plan.to_json())
    assert [m.pop("unit") for m in doc["methods"]] == [None, None, "absolute"]
    (tmp_path / "old.json").write_text(json.dumps(doc))
    for asked, last in ((plan, "absolute"), (tmp_path / "old.json", unit)):
        assert [m.unit for m in flow.plan(asked)] == [unit, unit, last]
    kept = jf.Plan(plan.methods, about={"batch": 16})
    assert flow.plan(kept).about == {"batch": 16}
    again = tmp_path / "new.json"
    flow.plan(plan).save(again)
    assert [m["unit"] for m in json.loads(again.read_text())["methods"]] == [unit, unit, "absolute"]


@pytest.mark.parametrize("name", ["maf-exp", "nsf-context"])
def test_the_unit_of_a_plan_is_what_decodes(name: str) -> None:
    one = subject(name)
    z = one.flow.noise(4, seed=0)
    sweeps = {}
    for unit in (None, "relative", "absolute"):
        plan = jf.Plan((jf.Method(tol=1e-3, unit=unit),) * 3)
        sweeps[unit] = [b.sweeps.tolist() for b in one.decode(z, plan).stats.blocks]
    assert sweeps[None] == sweeps["relative"] != sweeps["absolute"]


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
        (json.dumps({"format": "jacobiflow-plan", "version": 3}), "version 1"),
        (json.dumps({"format": "jacobiflow-plan", "version": 1}), "plan needs a field 'methods'"),
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
    with pytest.raises(jf.PlanError, match="one per block, not"):
        jf.Plan((1,))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="init must be one of"):
        flow.decode(z, "uniform", init="ones")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        flow.decode(z, "uniform", tolerance=0.5)  # type: ignore[call-arg]


def old(path: Path, *methods: jf.Method) -> Path:
    """A plan file as version 0.1 wrote it."""
    doc = json.loads(jf.Plan(methods).to_json())
    assert doc["version"] == 2
    path.write_text(json.dumps(doc | {"version": 1}))
    return path


@pytest.mark.parametrize("method", [jf.Method(width=2, tol=1e-3), jf.Method(tol=0.5, max_sweeps=9)])
def test_plans_for_closed_windows_load_with_one_warning(method: jf.Method, tmp_path: Path) -> None:
    path = old(tmp_path / "mine.json", jf.Method(width=1), method)
    want = f"^the plan {re.escape(str(path))} was made for closed windows: run tune again$"
    with pytest.warns(UserWarning, match=want):
        plan = jf.Plan.load(path)
    assert plan == jf.Plan((jf.Method(width=1), method))
    assert jf.Plan.load(path) == plan  # once per process; further warnings are errors here
    plan.save(path)
    assert json.loads(path.read_text())["version"] == 2


def test_other_plans_of_version_1_load(tmp_path: Path) -> None:
    methods = jf.Method(width=1), jf.Method(tol=0.5)
    assert jf.Plan.load(old(tmp_path / "mine.json", *methods)) == jf.Plan(methods)


@pytest.mark.parametrize("version", [0, 3, True, "1", 1.0, None])
def test_other_versions_are_refused(version: object) -> None:
    doc = json.loads(jf.Plan((jf.Method(),)).to_json()) | {"version": version}
    with pytest.raises(jf.PlanError, match=f"^this release reads plans of version 1 to 2, not {version!r}$"):
        jf.Plan.from_json(json.dumps(doc))
