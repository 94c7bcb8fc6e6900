"""`jacobiflow bench`: a table, a picture and JSON that say the same, of the plans and batches asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import jacobiflow as jf
from subjects import maf, tarflow

SHAPE: dict[str, Any] = {"image_size": 6, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tarflow(0.25, num_classes=3, **SHAPE).save("model")


def test_every_plan_at_every_batch(run: Any) -> None:
    jf.Plan((jf.Method(width=1), jf.Method(tol=0.5))).save("mine.json")
    ran = run("bench", "model", "--batch", 1, 3, "--plan", "uniform", "mine.json", "--repeats", 2, "--json")
    assert ran.status == 0
    doc = json.loads(ran.out)
    assert doc == json.loads(Path("bench/bench.json").read_text())
    plans = ("plain loop", "sequential", "uniform", "mine.json")
    assert [(r["batch"], r["plan"]) for r in doc["rows"]] == [(b, p) for b in (1, 3) for p in plans]
    flow = jf.load("model")
    z = flow.noise(3, seed=0)
    exact = flow.decode(z, "sequential").x
    for row in doc["rows"][5:]:
        out = flow.decode(z, row["plan"])
        assert row["largest"] == pytest.approx((out.x - exact).abs().max().item())
        assert row["sweeps"] == [b.sweeps.double().mean().item() for b in out.stats.blocks]
    runs = [line for line in ran.err.splitlines() if line.startswith("timing batch 3, run ")]
    assert [line.split(": ")[0] for line in runs] == [f"timing batch 3, run {i} of at most 2" for i in (1, 2)]
    assert doc["rows"][0]["speedup"] == doc["rows"][4]["speedup"] == 1
    assert 0 < doc["rows"][0]["largest"] < 1e-4  # the plain loop: rounding
    assert doc["threads"] >= 1
    assert doc["machine"]
    with Image.open("bench/bench.png") as picture:
        assert picture.height > 4 * 56  # a row of images per plan


def test_labels_tolerance_and_first_guess_reach_the_flow(run: Any) -> None:
    words = "bench model --batch 3 --labels 0-2 --tol 0.01 --init zeros --repeats 1 --out here"
    ran = run(*words.split())
    assert ran.status == 0
    assert max(map(len, ran.out.splitlines())) <= 80
    row = json.loads(Path("here/bench.json").read_text())["rows"][2]
    flow, labels = jf.load("model"), torch.tensor([0, 1, 2])
    out = flow.decode(flow.noise(3, seed=0), "selective", tol=0.01, init="zeros", labels=labels)
    assert row["sweeps"] == [b.sweeps.double().mean().item() for b in out.stats.blocks]
    assert "medians of 1 alternating run on" in ran.out
    assert "too noisy to tell" in ran.out  # a single run is no result
    assert not row["stable"]


def test_guidance_reaches_every_plan(run: Any) -> None:
    words = "bench model --batch 3 --labels 0-2 --plan uniform --repeats 1 --guidance 2 --annealed"
    assert run(*words.split()).status == 0
    doc = json.loads(Path("bench/bench.json").read_text())
    assert (doc["guidance"], doc["annealed"]) == (2.0, True)
    flow, labels = jf.load("model"), torch.tensor([0, 1, 2])
    options: dict[str, Any] = {"labels": labels, "guidance": jf.Guidance(weight=2.0, annealed=True)}
    assert [row["plan"] for row in doc["rows"]] == ["sequential", "uniform"]  # no plain loop with guidance
    exact, swept = (flow.decode(flow.noise(3, seed=0), row["plan"], **options) for row in doc["rows"])
    assert doc["rows"][1]["largest"] == pytest.approx((swept.x - exact.x).abs().max().item())


def test_the_table_says_what_the_report_says(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacobiflow.flows.compare.STABLE", 1e9)
    words = "bench model --batch 1 3 --labels 0-2 --plan uniform selective --repeats 3"
    ran = run(*words.split())
    assert ran.status == 0
    table, key, _, conclusion = ran.out.rstrip().split("\n\n")
    head, rule, *body = table.splitlines()
    assert max(map(len, ran.out.splitlines())) <= 80
    assert head.split() == ["plan", "batch", "seconds", "speed-up", "sweeps", "deviation", "backend", "status"]
    assert set(rule) == {"-", " "}
    assert key.startswith("sweeps: ")
    assert "written to bench: bench.json, bench.png\n" in ran.out
    assert "\nmedians of 3 alternating runs on\n" in ran.out
    assert ("1 thread," in ran.out) is (torch.get_num_threads() == 1)
    assert ran.err.startswith("timing 4 plans: this stops repeating after 120 s\n")
    doc = json.loads(Path("bench/bench.json").read_text())
    assert len(body) == len(doc["rows"]) == 8
    for line, row in zip(body, doc["rows"], strict=True):
        assert line.startswith(row["plan"])
        batch, seconds, speedup, *sweeps, largest, backend, status = line.removeprefix(row["plan"]).split()
        assert (int(batch), status) == (row["batch"], row["status"].lower())
        assert backend == row["backend"]
        assert float(seconds) == pytest.approx(row["seconds"], abs=6e-4)
        assert float(speedup.removesuffix("x")) == pytest.approx(row["speedup"], rel=0.06)
        assert [float(s) for s in sweeps] == ([round(sum(row["sweeps"]))] if row["sweeps"] else [])
        assert float(largest) == pytest.approx(row["largest"], rel=0.06)
    last = [row for row in doc["rows"] if row["plan"] == "selective"]
    gains = ", ".join(f"{row['speedup']:.2g}x as fast at batch {row['batch']}" for row in last)
    off = max(row["largest"] for row in last)
    exact = f"its samples deviate from exact by up to {off:.2g}."
    assert " ".join(conclusion.split()) == f"Compared with the plain loop, selective is {gains}; {exact}"


def test_speed_ups_that_runs_disagree_about_are_not_printed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacobiflow.flows.compare.STABLE", -1.0)
    ran = run("bench", "model", "--batch", 1, "--plan", "uniform", "--repeats", 4)
    assert [line.count("too noisy") for line in ran.out.splitlines()[2:5]] == [1, 1, 1]
    assert ran.out.endswith("The speed-up of uniform is too noisy to tell: repeat on a quiet machine.\n")


def test_results_are_replaced_only_if_asked_and_nothing_stale_stays(run: Any) -> None:
    words = ["--batch", "1", "--repeats", "1", "--plan", "sequential"]
    assert run("bench", "model", *words).status == 0
    before = Path("bench/bench.json").read_bytes()
    told = run("bench", "model", *words).complaint
    assert "bench has bench.json and bench.png: add --force to replace, or choose another name" in told
    assert Path("bench/bench.json").read_bytes() == before
    maf(0.5, features=5, blocks=2, hidden=(8,)).save("vectors")
    assert run("bench", "vectors", *words, "--force").status == 0
    assert [path.name for path in Path("bench").iterdir()] == ["bench.json"]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("model --batch 0", "--batch must be 1 or more, not 0"),
        ("model --batch", "--batch must be 1 or more"),
        ("model --seconds 0", "--seconds must be above 0, not 0"),
        ("model --repeats 0", "--repeats must be 1 or more, not 0"),
        ("model --seed -1", "--seed must be 0 or more, not -1"),
        ("model --guidance inf", "weight must be finite"),
        ("model --guidance 1", "changes nothing at attn_temp 1: add --labels"),
        ("vectors --guidance 1", "guidance is for TarFlow"),
        ("model --threads 0", "--threads must be 1 or more, not 0"),
        ("model --plan auto --tol 0.1", "auto carries its own"),
        ("model --plan sequential --tol 0.1", "sequential decoding is exact"),
        ("model --plan fast", "fast"),
        ("model --labels 3", "outside 0-2"),
        ("nothing", "nothing"),
        ("context", "needs context"),
    ],
)
def test_mistakes_are_one_line(run: Any, words: str, text: str) -> None:
    maf(0.5, features=4, hidden=(6,), context=2).save("context")
    maf(0.5, features=4, hidden=(6,)).save("vectors")
    assert text in run("bench", *words.split()).complaint
    assert not Path("bench").exists()


def test_samples_without_an_answer_fail_the_command(run: Any) -> None:
    flow = maf(1.0, features=4, blocks=1, hidden=(6,), scale="exp")
    with torch.no_grad():
        flow.blocks[0].head.bias[:] = 1e4
    flow.save("bad")
    ran = run("bench", "bad", "--batch", 1, 3, "--repeats", 1, "--plan", "uniform")
    assert ran.status == 1
    words = "3 of 3 samples are not finite: try float64, or check the weights"
    assert ran.err.splitlines()[-1] == f"jacobiflow bench: {words}"
    assert [line.split()[-2:] for line in ran.out.splitlines()[2:6]] == [[n, "nonfinite"] for n in "1133"]


def test_vectors_that_are_no_images_leave_no_picture(run: Any) -> None:
    maf(0.5, features=5, blocks=2, hidden=(8,)).save("vectors")
    ran = run("bench", "vectors", "--batch", 1, "--repeats", 1)
    assert "written to bench: bench.json\n" in ran.out
    assert [path.name for path in Path("bench").iterdir()] == ["bench.json"]
