"""Which backend ran and with which plan: in the stats and on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow.jobs.manifest import Job
from jacobiflow.kernels import compile
from subjects import maf, subject, tarflow

SHAPE: dict[str, Any] = {"image_size": 6, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The torch.compile backend without a wait for a C++ compiler."""
    compile.step.cache_clear()
    monkeypatch.setattr(compile, "options", lambda device: {"backend": "eager"})
    yield
    compile.step.cache_clear()
    torch.compiler.reset()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> jf.Flow:
    """A flow in the folder `model`, beside the MAF `maf`."""
    monkeypatch.chdir(tmp_path)
    flow = tarflow(0.25, num_classes=3, **SHAPE)
    flow.save("model")
    maf(0.5, features=4, hidden=(6,)).save("maf")
    return flow


@pytest.mark.parametrize("name", ["tarflow", "tarflow-guided", "maf-context"])
def test_stats_name_the_backend_and_the_plan(name: str) -> None:
    one = subject(name)
    z = one.flow.noise(2, seed=0)
    blocks = one.flow.bound_blocks(2, **one.condition(2), guidance=one.guidance)
    usual = " + ".join(sorted({b.engine.name for b in blocks}))
    for asked, ran in ((None, usual), ("torch", "torch")):
        stats = one.decode(z, "selective", tol=0.25, backend=asked).stats
        assert stats.backend == ran
        assert stats.plan == one.flow.plan("selective", tol=0.25)
        assert None not in [m.unit for m in stats.plan]
    mine = jf.Plan((jf.Method(width=2, tol=1e-3),) * 3)
    out = one.decode(z, mine, check=True) if not one.guidance.weight else one.decode(z, mine)
    assert out.stats.plan == mine.resolved(one.flow.default_unit)
    assert out.stats.backend == usual
    block = jf.decode(one.block(0, 2), one.flow.to_prior(z), mine[0]).stats
    assert (block.plan, block.backend) == (jf.Plan((mine[0].resolved(),)), one.block(0, 2).engine.name)


def test_sample_takes_a_backend(eager: None) -> None:
    flow = tarflow(0.2, **SHAPE)
    assert flow.sample(2, seed=0, backend="torch").stats.backend == "torch"
    assert flow.sample(2, seed=0, backend="compile").stats.backend == "compile"
    with pytest.raises(ValueError, match=r"^backend must be one of torch, .*, not 'gpu'$"):
        flow.sample(2, backend="gpu")  # type: ignore[arg-type]


def test_blocks_that_differ_are_joined(eager: None, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = tarflow(0.2, **SHAPE)
    first, _ = flow.bound_blocks(2, backend="torch")
    _, last = flow.bound_blocks(2, backend="compile")
    monkeypatch.setattr(flow, "bound_blocks", lambda *_, **__: [first, last])
    stats = flow.sample(2, seed=0).stats
    assert [b.backend for b in stats.blocks] == ["torch", "compile"]
    assert stats.backend == "compile + torch"


@pytest.mark.parametrize("command", ["bench", "sample"])
def test_commands_show_what_ran(command: str, model: jf.Flow, eager: None, run: Any) -> None:
    usual = model.sample(1, seed=0).stats.backend
    size = ("--batch", 2) if command == "bench" else ("-n", 2)
    for flags, ran in (((), usual), (("--backend", "torch"), "torch"), (("--backend", "compile"), "compile")):
        doc = json.loads(run(command, "model", *size, "--json", "--force", *flags).out)
        rows = doc["rows"][1:] if command == "bench" else [doc]  # the plain loop is torch
        assert {row["backend"] for row in rows} == {ran}
        text = run(command, "model", *size, "--force", *flags).out
        if command == "sample":
            assert f", backend {ran}, " in text
            continue
        head, _, plain, *rows = text.split("\n\n")[0].splitlines()
        assert plain.startswith("plain loop")
        at = head.index("backend")
        assert {row[at : at + 7].strip() for row in rows} == {ran}


@pytest.mark.parametrize("command", ["bench", "sample", "sample --format npz"])
def test_commands_refuse_in_one_line(command: str, model: jf.Flow, run: Any) -> None:
    name, *flags = command.split()
    text = "backend 'compile' does not support this flow here: leave it out"
    assert run(name, "maf", *flags, "--backend", "compile", "--out", "new").complaint.endswith(text)
    assert not Path("new").exists()


def test_jobs_keep_their_backend(model: jf.Flow, run: Any) -> None:
    words = "sample model -n 4 --format npz --batch 2 --out job"
    assert run(*words.split(), "--backend", "torch").status == 0
    job = Job.load(Path("job"))
    assert job is not None
    assert job.settings.backend == "torch"
    assert "backend torch, now None" in run(*words.split()).complaint


def test_models_show_what_would_run(run: Any) -> None:
    pytest.importorskip("jacobiflow_models")
    doc = json.loads(run("models", "--json").out)
    assert doc["models"]
    for entry in doc["models"]:
        flow = jf.load(entry["name"])
        assert flow.sample(1, plan="sequential", seed=0).stats.backend == entry["backend"]
