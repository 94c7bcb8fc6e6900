"""`jacobiflow tune`: the file it writes is the plan, the table says what was tried, mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jacobiflow as jf
from jacobiflow.core import tune as core
from jacobiflow.flows import tuning
from subjects import maf, tarflow

SHAPE: dict[str, Any] = {"image_size": 6, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}
TUNE = "tune model --batch 2 --labels 0-2"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with a flow of three classes and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "cache"))
    tarflow(0.25, num_classes=3, **SHAPE).save("model")


def trial(width: int | None, tol: float, seconds: float, off: float | None, rows: int) -> dict[str, Any]:
    method = {"width": width, "tol": tol, "max_sweeps": None, "init": "previous", "unit": "absolute"}
    return method | {"seconds": seconds, "deviation": off, "rows": rows}


TRIED = [
    [trial(1, 0.0, 0.1, 0.0, 64), trial(None, 0.5, 0.2, None, 2)],
    [
        trial(None, 0.5, 0.02, 0.25, 16),
        trial(16, 0.5, 0.03, 1.5, 2),
        trial(None, 0.15, 0.04, 0.125, 16),
        trial(None, 0.05, 0.05, 0.02, 16),
        trial(8, 0.5, 0.06, 0.3, 16),
        trial(1, 0.0, 0.1, 0.0, 64),
    ],
]
MEASURED = {"seconds": 0.15, "sequential_seconds": 0.21, "speedup": 1.4, "predicted_speedup": 1.333}
PLAN = jf.Plan(
    (jf.Method(width=1, unit="absolute"), jf.Method(tol=0.05, unit="absolute")),
    about={"measured": MEASURED | {"deviation": 0.031, "rows": 128}, "tried": TRIED},
)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the tuner was asked; it answers PLAN."""
    calls: list[dict[str, Any]] = []

    def answer(stack: Any, z: Any, **options: Any) -> jf.Plan:
        calls.append({"stack": stack} | options)
        return PLAN

    monkeypatch.setattr(core, "tune", answer)
    return calls


def test_the_plan_is_written_and_kept(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run(*TUNE.split(), "--out", "a/fast.json", "--json")
    assert ran.status == 0
    doc = json.loads(ran.out)
    plan = jf.Plan.load("a/fast.json")
    assert doc["methods"] == json.loads(plan.to_json())["methods"]
    assert {k: doc[k] for k in plan.about} == plan.about
    assert (doc["model"], doc["out"]) == ("model", "a/fast.json")
    assert (doc["setting"]["batch"], doc["setting"]["labels"]) == (2, True)
    assert doc["setting"]["max_deviation"] == 0.05
    assert "measuring block 2 of 2\n" in ran.err
    assert jf.Plan.load(doc["stored"]) == plan

    monkeypatch.setattr(core, "tune", None)  # no more tuning
    tuning._known.clear()
    args = "sample model -n 2 --labels 1,2 --plan auto a/fast.json --json"
    rows = json.loads(run(*args.split()).out)["rows"]
    assert [r["plan"] for r in rows] == ["auto", "a/fast.json"]
    with np.load("out/samples.npz") as file:
        assert np.array_equal(file["auto"], file["fast"])
        flow = jf.load("model")
        want = flow.decode(flow.noise(2, 0), plan, labels=torch.tensor([1, 2])).x
        assert np.array_equal(file["auto"], want.numpy())
    assert Path("out/auto.png").exists()


@pytest.mark.parametrize(
    ("extra", "kept"),
    [
        ("", True),
        ("--max-deviation 0.05", True),
        ("--guidance 1.5", True),
        ("--max-deviation 0.01", False),  # not what plan auto would ask for
        ("--guidance 1.2", False),
        ("--batch 3", False),
    ],
)
def test_what_is_kept_for_auto(run: Any, found: list[Any], extra: str, kept: bool) -> None:
    doc = json.loads(run(*TUNE.split(), *extra.split(), "--json").out)
    assert (doc["stored"] is not None) == kept == Path("cache").exists()
    assert jf.Plan.load("plan.json").about["setting"] == doc["setting"]


def test_the_table(run: Any, found: list[Any]) -> None:
    ran = run(*TUNE.split())
    assert ran.status == 0
    table, summary, written = ran.out.rstrip().split("\n\n")
    head, _, *rows = table.splitlines()
    assert " ".join(head.split()) == "block width tol first guess seconds speed-up largest dev."
    assert [" ".join(row.split()) for row in rows] == [
        "1 * sequential 0.1000 1.00x 0",
        "1 whole 0.5 previous 0.2000 0.50x > inf",
        "2 whole 0.5 previous 0.0200 5.00x 0.25",
        "2 16 0.5 previous 0.0300 3.33x > 1.5",
        "2 whole 0.15 previous 0.0400 2.50x 0.12",
        "2 * whole 0.05 previous 0.0500 2.00x 0.02",
        "2 sequential 0.1000 1.00x 0",
    ]
    assert summary == (
        "* the plan, on fresh noise in batches of 2: 0.150 s, sequential 0.210 s\n"
        "  speed-up 1.40x (the blocks predicted 1.33x)\n"
        "  largest deviation 0.031 over 128 samples; allowed 0.05"
    )
    assert max(map(len, [*table.splitlines(), *summary.splitlines()])) <= 80
    assert written.startswith("written to plan.json; plan auto uses it from now on, from\n  ")
    assert Path(written.split()[-1]).exists()
    assert run(*TUNE.split(), "--batch", 3).out.endswith("\n\nwritten to plan.json\n")


def test_options_reach_the_tuner(run: Any, found: list[Any]) -> None:
    threads = torch.get_num_threads()
    args = "--batch 5 --labels 2,0 --guidance 1.5 --max-deviation 0.2 --threads 1"
    assert run("tune", "model", *args.split()).status == 0
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    (call,) = found
    assert (call["batch"], call["max_deviation"]) == (5, 0.2)
    guided = call["stack"][0].conditioner
    assert guided.guidance == jf.Guidance(weight=1.5)
    own = jf.load("model").blocks[1].class_embed
    informed, null = guided.both.condition[:, 0].chunk(2)
    assert torch.equal(informed, own[(torch.arange(130) + 1) % 2 * 2])
    assert torch.allclose(null, own.mean(0))


@pytest.mark.filterwarnings("always")  # the command prints its warnings
def test_a_cache_that_cannot_be_written_is_a_warning(
    run: Any, found: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", "model/config.json")
    ran = run(*TUNE.split(), "--json")
    assert ran.status == 0
    assert json.loads(ran.out)["stored"] is None
    assert ran.err.count("jacobiflow: warning: the cache folder model/config.json is not used") == 1
    assert jf.Plan.load("plan.json") == PLAN


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("nothing", "no model 'nothing'"),
        ("model --batch 0", "--batch and --threads must be 1 or more"),
        ("model --threads 0", "--batch and --threads must be 1 or more"),
        (
            "model --max-deviation 0",
            "max_deviation must be positive, not 0.0: 'sequential' is the exact plan",
        ),
        ("model --max-deviation nan", "max_deviation must be positive"),
        ("model --labels 3", "--labels 3 is outside 0-2"),
        ("maf --labels 0", "this model takes no labels"),
        ("maf --guidance 1", "guidance is for TarFlow"),
        ("context", "this flow needs context, which the command line cannot give; use jf.tune in Python"),
        ("model --guidance inf", "weight must be finite"),
        ("model --device gpu", "--device must be auto"),
        ("model --out model", "--out model is a folder; give the file to write"),
        ("model --out model/config.json/plan.json", "cannot be made"),
    ],
)
def test_mistakes_are_one_line(run: Any, found: list[Any], args: str, words: str) -> None:
    maf(0.2, features=4, blocks=2, hidden=(4,)).save("maf")
    maf(0.2, features=4, blocks=2, hidden=(4,), context=2).save("context")
    text = run("tune", *args.split()).complaint
    assert text.startswith("jacobiflow tune: ")
    assert words in text
    assert not found
    assert not Path("plan.json").exists()


def test_sampling_by_auto_takes_no_tolerance(run: Any, found: list[Any]) -> None:
    text = run("sample", "model", "--plan", "auto", "--tol", "0.1").complaint
    assert "--tol and --init are for uniform and selective; auto carries its own" in text
    assert not found
