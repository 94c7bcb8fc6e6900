"""Sweeps, run time, memory and progress say what decoding did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow_lab.analysis import memory as memory_module
from jacobiflow_lab.analysis.memory import memory
from jacobiflow_lab.analysis.runtime import runtimes
from jacobiflow_lab.analysis.sweeps import kept, progress, sweeps
from subjects import subject, tarflow


@pytest.mark.parametrize("name", ["tarflow-labels", "maf-context"])
@pytest.mark.parametrize("plan", ["uniform", "selective"])
def test_sweeps_over_samples_and_of_the_slowest(name: str, plan: str) -> None:
    s = subject(name)
    z, given = s.flow.noise(7, seed=0), s.condition(7)
    found = sweeps(s.flow, z, plan, tol=0.1, batch=3, **given)
    whole = s.flow.decode(z, plan, tol=0.1, **given).stats.blocks
    assert (found.plan, found.tol, found.samples, found.batch) == (plan, 0.1, 7, 3)
    for layer, stats in zip(found.layers, whole, strict=True):
        count = stats.sweeps.double()
        assert layer.mean == pytest.approx(count.mean().item())
        assert layer.error == pytest.approx(count.std().item() / 7**0.5)
        assert layer.largest == count.max()
        most = (count[:3].max() + count[3:6].max() + count[6:].max()) / 3
        assert layer.batch_max == pytest.approx(most.item())
        assert layer.mean <= layer.batch_max <= layer.largest <= layer.bound == s.length - 1
    if plan == "selective" and name.startswith("tarflow"):
        assert found.layers[0].mean == s.length - 1  # the first position is given
    assert found.to_dict()["layers"][0]["bound"] == s.length - 1


def test_a_mixed_plan_has_no_one_tolerance() -> None:
    s = subject("tarflow")
    plan = jf.Plan((jf.Method(tol=0.1), jf.Method(tol=0.2), jf.Method(width=4, tol=0.1)))
    found = sweeps(s.flow, s.flow.noise(2, seed=0), plan)
    assert (found.tol, found.init, found.plan) == (None, None, "plan")
    assert [x.width for x in found.layers] == [None, None, 4]


def test_run_time_is_layers_and_the_rest() -> None:
    s = subject("tarflow-labels", torch.float32)
    said: list[str] = []
    plans = {"sequential": s.flow.plan("sequential"), "selective": s.flow.plan("selective")}
    options: dict[str, Any] = {"runs": 2, "repeats": 3, "labels": torch.arange(4) % 3}
    loop, exact, found = runtimes(s.flow, 4, plans, progress=said.append, plain=True, **options)
    assert said == [f"batch {i} of 6" for i in range(1, 7)]
    assert (loop["plan"], exact["plan"], found["plan"]) == ("plain loop", "sequential", "selective")
    assert len(found["layers"]) == len(s.flow.blocks)
    assert all(x["seconds"] > 0 for x in found["layers"])
    assert found["layers"][0]["sweeps"] == s.length - 1
    assert loop["layers"] == []
    assert exact["largest"] == 0.0
    assert loop["largest"] < 1e-3
    assert found["noise"] > 0
    assert found["denoising"] > 0  # the subject was made for noise
    assert found["communication"] < 0.01  # one process has nobody to talk to
    assert found["gathered"] == 4
    assert sum(found["shares"]) == pytest.approx(1)
    around = found["noise"] + found["denoising"] + found["communication"]
    assert found["other"] == pytest.approx(around + found["rest"])
    assert found["whole"] - found["seconds"] == pytest.approx(around)
    assert len(found["runs"]) == len(found["whole_runs"]) == 2
    assert found["spread"] == pytest.approx(abs(found["runs"][0] - found["runs"][1]) / 2)
    (swept,) = runtimes(s.flow, 2, {"uniform": s.flow.plan("uniform")}, denoise=False, backend="torch", repeats=1)
    assert swept["denoising"] < found["denoising"]
    assert swept["backend"] == "torch"


@pytest.mark.slow
def test_memory_is_that_of_the_cache_where_there_is_one(tmp_path: Path) -> None:
    flow = tarflow(0.01, image_size=32, patch_size=2, width=128, blocks=1, layers_per_block=4)
    cache = 16 * 2 * 4 * 256 * 128 * 4  # keys and values of four layers, sixteen samples
    jf.Plan((jf.Method(tol=100),)).save(tmp_path / "plan.json")
    cached, swept = memory(flow, [("sequential", "all"), (str(tmp_path / "plan.json"), "none")], n=16).peaks
    assert [(p.plan, p.cache) for p in (cached, swept)] == [("sequential", "all"), ("plan", "none")]
    assert 0.9 * cache < cached.peak < 2 * cache
    assert 0 < swept.peak < cached.peak
    assert cached.base > 10 * 2**20  # a process with torch in it


def test_a_cache_may_be_that_of_the_first_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, kept_by = tarflow(0.3, blocks=3), list[bool]()
    real = memory_module.decode

    def watched(*args: Any, cache: bool, **options: Any) -> Any:
        kept_by.append(cache)
        return real(*args, cache=cache, **options)

    monkeypatch.setattr(memory_module, "decode", watched)
    monkeypatch.setattr(memory_module, "_in_fresh_process", memory_module.trial)
    for cache, wanted in (("all", [True] * 3), ("first", [True, False, False]), ("none", [False] * 3)):
        kept_by.clear()
        memory(flow, [("selective", cache)], n=2)  # type: ignore[list-item]
        assert kept_by == 2 * wanted  # once for one sample, which pays for what is made at first use


def test_a_failed_measurement_says_why() -> None:
    with pytest.raises(jf.JacobiflowError, match=r"plan no-such failed: .*no plan is called 'no-such'"):
        memory(tarflow(0.3), [("no-such", "all")], n=1)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A training run's folder: weights that positions depend on more and more."""
    for step, by in ((100, 0.02), (20, 0.0), (3000, 0.25)):
        tarflow(by, num_classes=3).save(tmp_path / "kept" / f"step-{step:07d}")
    (tmp_path / "kept" / "notes").mkdir()
    return tmp_path


def test_progress_goes_through_the_kept_checkpoints_in_order(run_folder: Path) -> None:
    said: list[str] = []
    found = progress(
        run_folder, n=4, tol=0.01, labels=lambda classes: torch.arange(4) % classes, say=said.append, batch=2
    )
    assert [m.step for m in found.moments] == [20, 100, 3000]
    assert said == ["step 20", "step 100", "step 3000"]
    last = jf.load(run_folder / "kept" / "step-0003000")
    want = sweeps(last, last.noise(4, 0), "uniform", tol=0.01, batch=2, labels=torch.arange(4) % 3)
    assert found.moments[-1].sweeps == want
    first = [m.sweeps.layers[0].mean for m in found.moments]
    assert first == sorted(first)
    assert first[0] < first[-1]
    assert found.to_dict()["moments"][0]["step"] == 20
    assert kept(run_folder / "kept") == kept(run_folder)


def test_a_folder_that_keeps_nothing_is_no_run(tmp_path: Path) -> None:
    assert kept(tmp_path) == []
    with pytest.raises(jf.JacobiflowError, match="keep_every"):
        progress(tmp_path)
