"""plan="auto": made once for a setting, kept, found again, and never a reason to fail."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow.core import tune as core
from jacobiflow.core.cache_folder import cache_folder
from jacobiflow.flows import tuning
from subjects import maf, subject, tarflow

SHAPE: dict[str, Any] = {"image_size": 6, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}
PLAN = jf.Plan((jf.Method(tol=0.01), jf.Method(width=1))).in_unit("absolute")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every call of the tuner, which is quick here."""
    calls: list[dict[str, Any]] = []

    def quick(stack: Any, z: Any, **options: Any) -> jf.Plan:
        calls.append({"stack": stack, "rows": len(z)} | options)
        return PLAN if len(stack) == len(PLAN) else jf.Plan.sequential(len(stack))

    monkeypatch.setattr(core, "tune", quick)
    return calls


def forget() -> None:
    """As in a new process."""
    tuning._known.clear()
    tuning._digests.clear()


def labelled(seed: int = 0) -> jf.Flow:
    return tarflow(0.25, seed, num_classes=3, **SHAPE).eval()


def test_tuned_once_and_kept(folder: Path, asked: list[Any]) -> None:
    flow = labelled()
    z = flow.noise(4, seed=0)
    want = flow.decode(z, PLAN).x
    for _ in range(2):
        assert torch.equal(flow.decode(z, "auto").x, want)
    (call,) = asked
    assert (call["batch"], call["rows"], call["max_deviation"]) == (4, 128, 0.05)
    forget()
    again = labelled()
    assert torch.equal(again.sample(4, seed=0, plan="auto").x, want)
    assert len(asked) == 1
    (path,) = folder.iterdir()
    assert jf.Plan.load(path) == PLAN
    assert again.plan("auto", n=4) == PLAN


def test_weights_are_read_once(folder: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reads, digest = [], tuning.digest
    monkeypatch.setattr(tuning, "digest", lambda *args: reads.append(1) or digest(*args))
    flow = labelled()
    for _ in range(3):
        flow.sample(1, plan="auto")
    assert len(reads) == 1
    with torch.no_grad():
        flow.blocks[1].proj_out.bias.data[0] += 1
    flow.sample(1, plan="auto")
    assert len(reads) == len(asked) == 2


def test_every_setting_has_its_own(folder: Path, asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    flow = labelled()
    z = flow.noise(2, seed=0)
    for count, options in enumerate(
        (
            {},
            {"labels": 1},
            {"guidance": 1.0},
            {"guidance": jf.Guidance(weight=1.0, annealed=True)},
            {"guidance": 1.2, "labels": 1},
            {"differentiable": True},
        ),
        start=1,
    ):
        for _ in range(2):
            flow.decode(z, "auto", **options)
            assert len(asked) == count
    flow.decode(z, "auto", labels=2)
    flow.decode(z, "auto", guidance=1.5, labels=torch.tensor([0, -1]))  # the next half step
    flow.decode(flow.noise(3, seed=0)[:2], "auto")
    assert len(asked) == 6
    flow.decode(flow.noise(3, seed=0), "auto")
    with torch.no_grad():
        flow.blocks[0].proj_out.bias[0] += 1e-3
    flow.decode(z, "auto")
    flow.double().decode(z.double(), "auto")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 17)
    flow.decode(z.double(), "auto")
    monkeypatch.setattr(tuning, "machine", lambda device: "another")
    flow.decode(z.double(), "auto")
    assert len(asked) == len(list(folder.iterdir())) == 11
    docs = [jf.Plan.load(p).about["setting"] for p in folder.iterdir()]
    assert {d["batch"] for d in docs} == {2, 4}
    assert {d["dtype"] for d in docs} == {"float32", "float64"}
    assert {d["max_deviation"] for d in docs} == {0.05, 10 * 1e-6}
    assert {d["guidance"]["weight"] for d in docs} == {0.0, 1.0, 1.5}


def test_batches_take_the_nearest_power_of_two(folder: Path, asked: list[Any]) -> None:
    flow = maf(0.5, features=4, blocks=2, hidden=(8,))
    for n in (1, 2, 3, 5, 4, 6, 300, 1000, 200):
        flow.sample(n, plan="auto")
    assert [call["batch"] for call in asked] == [1, 2, 4, 8, 256]
    assert [call["rows"] for call in asked] == [128, 128, 128, 128, 512]
    assert all(call["max_deviation"] == 1e-4 for call in asked)


def test_nothing_to_decode_is_not_tuned(folder: Path, asked: list[Any]) -> None:
    flow = labelled()
    assert flow.sample(0, plan="auto").x.shape == (0, 1, 6, 6)
    assert not asked


@pytest.mark.parametrize("damage", ["", "{", "[]", "other", "blocks", "old"])
def test_a_damaged_plan_is_made_again(folder: Path, asked: list[Any], damage: str) -> None:
    flow = labelled()
    flow.sample(1, plan="auto")
    (path,) = folder.iterdir()
    doc = json.loads(path.read_text())
    if damage == "other":
        doc["about"]["setting"]["batch"] = 8
        damage = json.dumps(doc)
    elif damage == "blocks":
        damage = json.dumps(doc | {"methods": doc["methods"] * 2})
    elif damage == "old":  # of version 0.1, which closed its windows; no warning
        doc["methods"][0] |= {"width": 4, "tol": 1e-3}
        damage = json.dumps(doc | {"version": 1})
    path.write_text(damage)
    forget()
    flow.sample(1, plan="auto")
    assert len(asked) == 2
    assert jf.Plan.load(path).methods == PLAN.methods
    assert list(folder.iterdir()) == [path]


@pytest.mark.parametrize("tol", [0.501, 1e9])  # the tuner tries 10 times the bound of 0.05
def test_a_plan_looser_than_any_the_tuner_tries_is_ignored(
    folder: Path, asked: list[Any], tol: float
) -> None:
    flow = labelled()
    flow.sample(1, plan="auto")
    (path,) = folder.iterdir()
    doc = json.loads(path.read_text())
    doc["methods"][0]["tol"] = tol
    path.write_text(json.dumps(doc))
    forget()
    words = re.escape(f"{path} is ignored: its tolerance {tol:g} is larger")
    with pytest.warns(UserWarning, match=words) as caught:
        assert flow.plan("auto", n=1) == PLAN
    assert len(caught) == 1
    assert len(asked) == 2
    doc["methods"][0]["tol"] = 0.5
    path.write_text(json.dumps(doc))
    forget()
    assert flow.plan("auto", n=1)[0].tol == 0.5
    assert len(asked) == 2


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_plan_in_a_folder_that_others_can_write_is_not_used(
    folder: Path, asked: list[Any], mode: int
) -> None:
    flow = labelled()
    flow.sample(1, plan="auto")
    (path,) = folder.iterdir()
    doc = json.loads(path.read_text())
    doc["methods"][0]["tol"] = 0.5
    path.write_text(json.dumps(doc))
    folder.chmod(mode)
    forget()
    with pytest.warns(UserWarning, match=f"{folder}: others can write to it") as caught:
        found = [flow.plan("auto", n=1) for _ in range(2)]
    assert found == [PLAN, PLAN]
    assert len(caught) == 1
    assert len(asked) == 2  # once more; this process remembers it
    assert json.loads(path.read_text()) == doc


def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: list[Any]
) -> None:
    forget()
    (tmp_path / "file").touch()
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "file"))
    flow = labelled()
    with pytest.warns(UserWarning, match="nothing is kept between runs; set JACOBIFLOW_CACHE") as caught:
        flow.sample(1, plan="auto")
    assert len(caught) == 1
    flow.sample(1, plan="auto")  # no second warning, which would be an error here
    assert len(asked) == 1


def test_where_plans_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", "/own")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/own")
    monkeypatch.delenv("JACOBIFLOW_CACHE")
    assert cache_folder() == Path("/shared/jacobiflow")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "jacobiflow"


def test_threads_wait_for_one_tuning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def slow(stack: Any, z: Any, **options: Any) -> jf.Plan:
        calls.append(1)
        time.sleep(0.05)
        return PLAN

    monkeypatch.setattr(core, "tune", slow)
    flow = labelled()
    found: list[jf.Plan] = []
    threads = [threading.Thread(target=lambda: found.append(flow.plan("auto", n=2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert found == [PLAN] * 4


def test_what_samples_are_tuned_on(folder: Path, asked: list[Any]) -> None:
    flow = labelled()
    flow.sample(2, labels=1, plan="auto")
    flow.sample(2, plan="auto")
    classes, none = (call["stack"][0].conditioner.condition for call in asked)
    own = flow.blocks[1].class_embed
    assert torch.equal(classes[:, 0], own[torch.arange(128) % 3])
    assert torch.allclose(none[:, 0], own.mean(0))
    flow = subject("maf-context").flow
    context = torch.arange(9.0).reshape(3, 3).double()
    flow.sample(3, context=context, plan="auto")
    flow.sample(3, context=context[1], plan="auto")
    assert len(asked) == 3
    assert torch.equal(asked[2]["stack"][0].conditioner.context, context[torch.arange(128) % 3])


def test_mistakes_are_found_before_tuning(folder: Path, asked: list[Any]) -> None:
    flow = labelled()
    z = flow.noise(2, seed=0)
    for options in ({"tol": 0.5}, {"init": "zeros"}):
        with pytest.raises(TypeError, match="'auto' carry their own"):
            flow.decode(z, "auto", **options)
    with pytest.raises(ValueError, match=r"0 \.\. 2"):
        flow.decode(z, "auto", labels=3)
    with pytest.raises(ValueError, match="needs context"):
        subject("maf-context").flow.sample(2, plan="auto")
    with pytest.raises(ValueError, match="guidance is for TarFlow"):
        subject("maf-affine").flow.sample(2, plan="auto", guidance=1.0)
    with torch.no_grad():
        flow.blocks[0].proj_in.bias[0] = float("nan")
    with pytest.raises(jf.NonfiniteError):
        flow.decode(z, "auto")
    assert not asked
    flow = labelled()
    for bad in ({"batch_size": 0}, {"rows": 0}, {"max_deviation": 0.0}, {"max_deviation": float("nan")}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            jf.tune(flow, **bad)


@pytest.mark.parametrize("name", ["tarflow-labels", "tarflow-shift", "maf-context", "nsf"])
def test_a_real_plan_keeps_its_bound(name: str) -> None:
    one = subject(name, torch.float32)
    options = one.condition(32)
    plan = jf.tune(one.flow, 2, 0.02, rows=16, **options)
    about = plan.about
    assert about["setting"]["batch"] == 2
    assert about["setting"]["max_deviation"] == 0.02
    assert about["setting"]["threads"] == torch.get_num_threads()
    assert about["setting"]["torch"] == torch.__version__
    assert about["setting"]["machine"]
    assert len(about["tried"]) == 3
    z = one.flow.noise(32, tuning.SEED)
    off = one.flow.decode(z, plan, **options).x - one.flow.decode(z, "sequential", **options).x
    assert off.abs().max() <= 0.016
    assert about["measured"]["deviation"] == pytest.approx(off.abs().max().item(), abs=1e-4)
    assert jf.Plan.from_json(plan.to_json()).about == about


def test_global_random_numbers_are_left_alone(folder: Path) -> None:
    torch.manual_seed(0)
    want = torch.rand(3)
    torch.manual_seed(0)
    subject("maf-affine").flow.plan("auto", n=1)
    assert torch.equal(torch.rand(3), want)
