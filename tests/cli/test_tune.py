"""`jacobiflow tune`: the file it writes is the plan, the table says what was tried, mistakes are one line."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jacobiflow as jf
from subjects import maf, tarflow

SHAPE: dict[str, Any] = {"image_size": 6, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}
TUNE = "tune model --batch 2 --labels 0-2"


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own, with a flow of three classes and an empty cache."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "cache"))
    tarflow(0.25, num_classes=3, **SHAPE).save("model")


def trial(predicted: float, seconds: float | None, off: float | None, *methods: jf.Method) -> dict[str, Any]:
    return {
        "methods": [asdict(m) for m in methods],
        "predicted": predicted,
        "seconds": seconds,
        "deviation": off,
        "stable": seconds != 0.18,
    }


EXACT = jf.Method(width=1, unit="absolute")
SWEPT = jf.Method(tol=0.05, init="calibrated", unit="absolute")
WINDOW = jf.Method(width=8, tol=1e-3, init="previous", unit="absolute")
TRIED = [
    trial(0.21, 0.21, 0.0, EXACT, EXACT),
    trial(0.14, 0.15, 0.031, EXACT, SWEPT),
    trial(0.10, None, 0.25, SWEPT, SWEPT),
    trial(0.16, 0.18, 0.002, WINDOW, SWEPT),
    trial(0.17, None, None, WINDOW, WINDOW),
]
MEASURED = {
    "seconds": 0.15,
    "sequential_seconds": 0.21,
    "speedup": 1.4,
    "predicted_speedup": 1.5,
    "stable": True,
}
SETTING = {"machine": "m", "device": "cpu", "threads": 1, "batch": 2, "max_deviation": 0.05}
PLAN = jf.Plan(
    (EXACT, SWEPT),
    about={"setting": SETTING, "measured": MEASURED | {"deviation": 0.031, "rows": 64}, "tried": TRIED},
)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the tuner was asked; it answers PLAN."""
    calls: list[dict[str, Any]] = []

    def answer(flow: jf.Flow, batch: int, max_deviation: float | None, **options: Any) -> jf.Plan:
        if max_deviation is not None and not max_deviation > 0:
            return jf.tune(flow, batch, max_deviation)  # raises
        calls.append({"flow": flow, "batch": batch, "max_deviation": max_deviation} | options)
        return PLAN

    monkeypatch.setattr("jacobiflow.cli.tune.tune", answer)
    return calls


def test_the_plan_is_written_and_the_profile_kept(run: Any) -> None:
    ran = run(*TUNE.split(), "--out", "a/fast.json", "--json")
    assert ran.status == 0
    doc = json.loads(ran.out)
    plan = jf.Plan.load("a/fast.json")
    assert doc["methods"] == json.loads(plan.to_json())["methods"]
    assert {k: doc[k] for k in plan.about} == plan.about
    assert (doc["model"], doc["out"]) == ("model", "a/fast.json")
    assert (doc["setting"]["batch"], doc["setting"]["max_deviation"]) == (2, 0.05)
    steps = re.findall(r"^measuring (.*?)(\d+) of (?:at most )?(\d+) \(part (\d) of 3\)", ran.err, re.MULTILINE)
    assert [(text, int(i), int(part)) for text, i, n, part in steps[:5]] == [
        *(("first guess of block ", i, 1) for i in (1, 2)),
        *(("profile, block ", i, 2) for i in (1, 2)),
        ("plans, step ", 1, 3),
    ]
    last = [(int(i), int(n)) for text, i, n, _ in steps[4:]]  # all of the rest is counted, so that its end is known
    assert [i for i, _ in last] == list(range(1, len(last) + 1))
    assert len({n for _, n in last}) == 1
    assert last[-1][0] <= last[-1][1]
    assert len(steps) == len(ran.err.splitlines())
    assert {p.name for p in Path(doc["stored"]).iterdir()} == {"guess.safetensors", "profile.json"}
    flow = jf.load("model")
    want = flow.decode(flow.noise(2, 0), plan, labels=torch.tensor([1, 2])).x
    assert run(*["sample", "model", "-n", "2", "--labels", "1,2", "--plan", "a/fast.json"]).status == 0
    with np.load("out/samples.npz") as file:
        assert np.array_equal(file["x"], want.numpy())


def test_a_calibrated_plan_finds_the_guesses_in_the_cache_folder(run: Any) -> None:
    assert run(*TUNE.split()).status == 0
    flow = jf.load("model")
    assert flow.calibration is None
    flow.decode(flow.noise(2, 0), jf.Plan((EXACT, SWEPT)), labels=1)
    assert flow.guesses() is not None


def test_what_was_measured_goes_beside_the_checkpoint_if_asked(run: Any) -> None:
    assert run(*TUNE.split(), "--save").status == 0
    flow = jf.load("model")
    assert flow.profile is not None
    assert flow.guesses() is not None
    assert "is not a checkpoint folder" in run("tune", "mnist-small", "--save").complaint


def test_the_table(run: Any, found: list[Any]) -> None:
    ran = run(*TUNE.split())
    assert ran.status == 0
    table, key, summary, written = ran.out.rstrip().split("\n\n")
    head, _, *rows = table.splitlines()
    assert " ".join(head.split()) == "plan seconds speed-up deviation"
    assert [" ".join(row.split()) for row in rows] == [
        "1 T/0.05 * 0.1500 1.40x 0.031",
        "8/0.001p T/0.05 0.1800 too noisy 0.002",
        "2*1 0.2100 1.00x 0",
        "2*T/0.05 0.25",
        "2*8/0.001p inf",
    ]
    assert summary == (
        "* on fresh noise in batches of 2: 0.1500 s, sequential 0.2100 s, speed-up 1.40x\n"
        "  largest deviation 0.031 over 64 samples; 0.05 is allowed"
    )
    assert "1 is sequential" in key
    assert max(map(len, f"{table}\n{key}\n{summary}".splitlines())) <= 80
    assert written.startswith("written to plan.json; plan auto uses what was measured, from\n  ")


def test_a_plan_is_replaced_only_if_asked(run: Any, found: list[Any]) -> None:
    Path("plan.json").write_text("mine")
    assert "plan.json: add --force to replace" in run(*TUNE.split()).complaint
    assert (Path("plan.json").read_text(), found) == ("mine", [])
    assert run(*TUNE.split(), "--force").status == 0
    assert jf.Plan.load("plan.json") == PLAN


def test_options_reach_the_tuner(run: Any, found: list[Any]) -> None:
    threads = torch.get_num_threads()
    args = "--batch 5 --labels 2,0 --guidance 1.5 --annealed --max-deviation 0.2 --threads 1"
    assert run("tune", "model", *args.split()).status == 0
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    (call,) = found
    assert (call["batch"], call["max_deviation"]) == (5, 0.2)
    assert call["guidance"] == jf.Guidance(weight=1.5, annealed=True)
    assert call["labels"] == (2, 0)  # in turn


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
        ("model --batch 0", "--batch must be 1 or more, not 0"),
        ("model --threads 0", "--threads must be 1 or more, not 0"),
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
        ("model --guidance 1", "changes nothing at attn_temp 1: add --labels"),
        ("model --device gpu", "--device must be auto"),
        ("model --out model", "--out model is a folder: give the file to write"),
        ("model --out model/config.json/plan.json", "model/config.json is a file: give a folder"),
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
