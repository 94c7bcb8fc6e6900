"""`jacobiflow analyze`: figures and JSON of what the functions find; mistakes are one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jacobiflow as jf
from jacobiflow_lab.analysis import memory
from jacobiflow_lab.analysis.convergence import convergence
from jacobiflow_lab.analysis.redundancy import redundancy
from jacobiflow_lab.analysis.sweeps import sweeps
from running import Run
from subjects import maf, tarflow

SHAPE: dict[str, Any] = {"image_size": 12, "patch_size": 2, "width": 8, "head_dim": 4, "layers_per_block": 1}


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tarflow(0.35, num_classes=3, blocks=2, **SHAPE).save("model")


def test_everything_that_can_be_known_of_a_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_in_fresh_process", memory.trial)  # without a process for each
    ran = run("analyze", "model", "-n", 5, "--labels", "0-2", "--repeats", 1, "--batch", 3, "--out", "look")
    assert ran.status == 0, ran.err
    names = {p.name for p in Path("look").iterdir()}
    whats = ("redundancy", "convergence", "sweeps", "runtime", "memory")
    assert names == {f"{w}.{e}" for w in whats for e in ("json", "png")} | {
        "masked-attention.png",
        "masked-strict.png",
        "ratios.png",
    }
    for name in names:
        assert name in ran.out
    for word in ("attention", "slowest sample of a batch", "share", "MiB", "ratio falls"):
        assert word in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert not {"paper", "paper's", "layer", "Layers", "model"} & set(re.findall(r"[\w']+", ran.out))  # of one flow
    assert "all in torch" not in ran.out  # what was not measured has no table
    lines = [line.split(", ")[:2] for line in ran.err.splitlines()]  # progress without a terminal
    assert [study for study in lines if "study" in study[1]] == [
        [f"analyzing {what}", f"study {i + 1} of 5"] for i, what in enumerate(whats)
    ]
    assert ["analyzing runtime", "model"] in lines
    doc = json.loads(Path("look/runtime.json").read_text())
    assert [r["plan"] for r in doc["runtime"]["compare"]] == ["sequential", "uniform", "selective"]
    assert (doc["n"], doc["labels"], doc["versions"]["jacobiflow"]) == (5, "0-2", jf.__version__)


def test_the_json_is_what_the_functions_say(run: Run) -> None:
    what = ("--what", "redundancy", "sweeps", "convergence")
    ran = run("analyze", "model", "-n", 4, "--o", 1, 3, "--tol", 0.1, "--json", *what)
    assert ran.status == 0
    doc = json.loads(ran.out)
    flow = jf.load("model").requires_grad_(False)
    z = flow.noise(4, 0)
    assert doc["redundancy"]["masked"] == redundancy(flow, z, offsets=(1, 3)).to_dict()["masked"]
    wanted = {p: sweeps(flow, z, p, tol=0.1, batch=4).to_dict() for p in ("uniform", "selective")}
    assert {p: {k: found[k] for k in wanted[p]} for p, found in doc["sweeps"]["plans"].items()} == wanted
    curves = convergence(flow, z, double=True).to_dict()["blocks"]
    assert [b["jacobi"] for b in doc["convergence"]["blocks"]] == [b["jacobi"] for b in curves]
    for name in doc["files"]:
        assert Path("out", name).exists()
    assert json.loads(Path("out/sweeps.json").read_text())["sweeps"] == doc["sweeps"]


def test_run_time_of_two_processes_has_their_communication() -> None:
    def two(*what: str) -> subprocess.CompletedProcess[str]:
        torchrun = [
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            "-m",
            "jacobiflow.cli.main",
        ]
        given = ["analyze", "model", "-n", "3", "--batch", "3", "--repeats", "3", "--json", *what]
        return subprocess.run([sys.executable, "-m", *torchrun, *given], capture_output=True, text=True, timeout=300)

    ran = two("--what", "runtime")
    assert ran.returncode == 0, ran.stderr
    doc = json.loads(ran.stdout)
    assert doc["processes"] == 2
    assert [row["gathered"] for row in doc["runtime"]["compare"]] == [6, 6, 6]
    assert all(row["communication"] > 0 for row in doc["runtime"]["compare"])
    assert json.loads(Path("out/runtime.json").read_text())["runtime"] == doc["runtime"]
    refused = two()
    assert refused.returncode != 0
    assert refused.stderr.count("several processes measure run time only: add --what runtime") == 1


def test_a_training_run_has_progress(run: Run) -> None:
    for step, by in ((10, 0.1), (200, 0.35)):
        tarflow(by, num_classes=3, blocks=2, **SHAPE).save(f"run/kept/step-{step:07d}")
    ran = run("analyze", "run", "-n", 3, "--what", "progress", "--json")
    assert ran.status == 0
    doc = json.loads(ran.out)
    assert [m["step"] for m in doc["progress"]["moments"]] == [10, 200]
    assert Path("out/progress.png").exists()
    assert "keeps no checkpoints" in run("analyze", "model", "--what", "progress").complaint


def test_a_masked_mlp_has_no_attention(run: Run) -> None:
    maf(1.1).save("maf")
    ran = run("analyze", "maf", "-n", 3, "--what", "redundancy", "--json")
    assert ran.status == 0
    assert {m["variant"] for m in json.loads(ran.out)["redundancy"]["masked"]} == {"strict"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--what", "beauty"), "--what knows redundancy"),
        (("--what", "swep"), ", not 'swep' (did you mean sweeps?)"),
        (("-n", 0), "must be 1 or more"),
        (("--o", -1), "--o takes"),
        (("--labels", "7"), "outside 0-2"),
        (("--tol", "-1"), "tol"),
        (("--out", "/dev/null/x"), "cannot be made"),
    ],
)
def test_mistakes_are_one_line(run: Run, options: tuple[object, ...], words: str) -> None:
    assert words in run("analyze", "model", *options).complaint


def test_help_fits_and_shows_an_example(run: Run) -> None:
    ran = run("analyze", "--help")
    assert ran.status == 0
    assert "example: jacobiflow analyze mnist" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
