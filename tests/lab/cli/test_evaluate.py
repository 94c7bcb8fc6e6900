"""`jacobiflow evaluate`, in this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import jacobiflow as jf
from jacobiflow_lab.lattice.ising import Ising
from jacobiflow_lab.lattice.lattice_flow import LatticeConfig, LatticeFlow
from jacobiflow_lab.metrics import METRICS, samples
from stand_ins import Tiny, image_flow, make_clip
from subjects import tarflow

PATIENCE = 180  # seconds


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """N(0, K) for a 3 x 3 torus."""
    folder = tmp_path_factory.mktemp("small")
    config = LatticeConfig(features=9, blocks=1, hidden=(8,), linear=True, temperature=12.0)
    LatticeFlow(config).save(folder)
    return folder


def test_json(run, small):
    doc = json.loads(run("evaluate", small, "-n", 500, "--json").out)
    target = Ising(side=3, temperature=12.0)
    assert doc["metrics"] == ["ising"]
    assert doc["target"] == {"kind": "ising", "side": 3, "temperature": 12.0, "shift": 0.0}
    assert (doc["samples"], doc["not_finite"], doc["seed"]) == (500, 0, 0)
    assert doc["versions"] == {"jacobiflow": jf.__version__, "torch": torch.__version__}
    assert doc["exact_log_z"] == target.log_z()
    assert doc["exact_energy_per_site"] == target.exact_energy()
    for name in ("energy_per_site", "abs_magnetization", "effective_sample_size", "log_z_bound"):
        assert doc[f"{name}_error"] > 0
    assert 0 < doc["effective_sample_size"] < 1
    assert doc["log_z_bound"] < doc["exact_log_z"]
    assert doc["monte_carlo_abs_magnetization_error"] < 0.01
    same = json.loads(run("evaluate", small, "-n", 500, "--json", "--metrics", "ising", "--plan", "sequential").out)
    assert same["log_z_bound"] == pytest.approx(doc["log_z_bound"], abs=1e-3)
    other = json.loads(run("evaluate", small, "-n", 500, "--json", "--seed", 1).out)
    assert other["energy_per_site"] != doc["energy_per_site"]


@pytest.mark.filterwarnings("default")
def test_images_unlike_those_of_the_model(run, tmp_path):
    """Other sizes or colours are named; pixels that are not 0 to 255 are refused."""
    image_flow().save(tmp_path / "model")
    shape = jf.load(tmp_path / "model").data_shape
    side = shape[1]
    draw = np.random.default_rng(0)
    flags = ("evaluate", tmp_path / "model", "--metrics", "bpd", "-n", 4, "--labels", "none", "--data")
    for name, size, channels in (("same", side, shape[0]), ("other", side + 2, 4 - shape[0])):
        x = draw.integers(0, 256, (40, size, size, channels)).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", x_train=x, x_test=x)
    assert "warning" not in run(*flags, tmp_path / "same.npz").err
    colours = {1: "grey", 3: "colour"}
    said = run(*flags, tmp_path / "other.npz").err
    assert f"are {side + 2} x {side + 2} {colours[4 - shape[0]]}, those of the model are {side} x {side} " in said
    np.savez(tmp_path / "dark.npz", x=draw.integers(0, 2, (40, side, side, shape[0])).astype(np.uint8))
    ran = run(*flags, tmp_path / "dark.npz")
    assert (ran.status, "no pixel is above 1: store pixels from 0 to 255" in ran.err) == (2, True)


def test_classes_of_folders_go_by_their_names(run, tmp_path):
    """Sub-folders are numbered in their own order, which need not be the model's."""
    shape = {"image_size": 8, "patch_size": 4, "width": 16, "head_dim": 8, "blocks": 2, "layers_per_block": 1}
    names = ("maple tree", "cat", "dog")
    tarflow(0.5, num_classes=3, class_names=names, **shape).save(tmp_path / "model")
    pixels = np.random.default_rng(0).integers(0, 256, (12, 8, 8)).astype(np.uint8)
    folders = ["cat"] * 4 + ["dog"] * 4 + ["maple_tree"] * 4
    for i, (image, folder) in enumerate(zip(pixels, folders, strict=True)):
        (tmp_path / "data" / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(tmp_path / "data" / folder / f"{i:02}.png")
    numbers = np.array([names.index(folder.replace("_", " ")) for folder in folders])
    np.savez(tmp_path / "right.npz", x=pixels, y=numbers)
    np.savez(tmp_path / "wrong.npz", x=pixels, y=np.arange(12) // 4)
    flags = ("evaluate", tmp_path / "model", "--metrics", "bpd", "--split", "train", "--json", "--data")
    found, right, wrong = (
        json.loads(run(*flags, tmp_path / name).out)["results"]["bpd"]["value"]
        for name in ("data", "right.npz", "wrong.npz")
    )
    assert found == right != wrong
    (tmp_path / "data" / "dog").rename(tmp_path / "data" / "cow")
    ran = run(*flags, tmp_path / "data")
    assert (ran.status, "'cow' is not a class of the model (maple tree, cat, dog): rename" in ran.err) == (2, True)
    assert run(*flags, tmp_path / "data", "--labels", "none").status == 0


def test_table(run, small):
    ran = run("evaluate", small, "-n", 100, "--batch", 30)
    assert ran.status == 0
    assert "3 x 3 Ising model at T = 12, 100 samples" in ran.out
    for word in ("energy per site", "|m|", "effective sample size", "log Z", "±", "Kaufman"):
        assert word in ran.out
    assert f"{Ising(side=3, temperature=12.0).log_z():.4f}" in ran.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("mnist", "--metrics", "ising"), "this flow was not trained for an Ising model; try ising-16"),
        (("mnist",), "give --data for fid and kid, or choose with --metrics, of ising, fid, kid"),
        (("mnist", "--metrics", "fod"), ", not 'fod' (did you mean fid?)"),
        (("mnist", "--metrics", "fidelity"), "--metrics knows ising, fid, kid, brisque, clip-iqa, "),
        (("mnist", "--metrics", "ising", "fid"), "--metrics ising is for fields and stands alone"),
        (("mnist", "--metrics", "fid"), "fid needs real images: give --data"),
        (("mnist", "--metrics", "clip-iqa"), "CLIP-IQA needs the weights of a CLIP: give one as --clip"),
        (("mnist", "--metrics", "paired", "--labels", "12"), "--labels 12 is outside 0-9"),
        (("mnist", "--metrics", "bpd", "--data", "nothing.npz"), "nothing.npz does not exist"),
        (("mnist-maf", "--metrics", "brisque", "--guidance", "1"), "guidance"),
        (("mnist", "-n", "1"), "-n and --real must be 2 or more"),
        (("mnist", "--plan", "fast"), "no plan is called 'fast'"),
        (
            ("mnist", "--metrics", "paired", "--plan", "auto", "--tol", "0.1"),
            "tol and init belong to plans 'uniform' and 'selective'",
        ),
        (
            ("mnist", "--metrics", "paired", "--tol", "0.1", "--max-deviation", "0.1"),
            "--max-deviation is for plan auto: leave it out, or leave out --plan and --tol",
        ),
        (("nothing",), "no model 'nothing'"),
    ],
)
def test_refusals(run, flags, said):
    assert said in run("evaluate", *flags).complaint


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A conditional flow of grey 16 x 16 images."""
    folder = tmp_path_factory.mktemp("painter")
    image_flow().save(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "grey.npz"
    draw = np.random.default_rng(0)
    train, held = (draw.integers(0, 256, (n, 16, 16), dtype=np.uint8) for n in (30, 20))
    np.savez(path, x_train=train, y_train=np.arange(30) % 3, x_test=held, y_test=np.arange(20) % 3)
    return path


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Tiny:
    tiny = Tiny()
    monkeypatch.setattr(samples, "load_inception", lambda device: tiny)
    return tiny


def test_images_json(run, painter, data, network, tmp_path):
    make_clip(tmp_path)
    asked = ["fid", "kid", "brisque", "clip-iqa", "bpd", "reconstruction", "paired"]
    ran = run("evaluate", painter, "--data", data, "--metrics", *asked, "-n", 10, "--clip", tmp_path, "--json")
    doc = json.loads(ran.out)
    assert set(doc["results"]) == {*asked, "invertibility"}
    assert doc["metrics"] == asked
    assert (doc["samples"], doc["seed"], doc["plan"], doc["split"]) == (10, 0, "auto", "validation")
    assert doc["command"].startswith(f"jacobiflow evaluate {painter} --data {data} --metrics fid kid")
    assert {"jacobiflow", "torch", "torchmetrics", "brisque", "transformers"} < set(doc["versions"])
    assert (doc["results"]["fid"]["samples"], doc["results"]["fid"]["real"]) == (10, 10)
    assert "biased upwards" in doc["results"]["fid"]["note"]
    assert doc["results"]["bpd"]["noise"] == "gaussian"
    assert network.seen == 10 + 10 + 10  # real ones, samples, and samples of the other plan
    for stage in ("features of real images: 10", "samples: 10", "reconstruction: 10"):
        assert f"measuring {stage}" in ran.err
    again = run("evaluate", painter, "--data", data, "-n", 10, "--json")
    assert json.loads(again.out)["results"]["fid"] == doc["results"]["fid"]  # fid and kid go without saying
    assert network.seen == 40  # real ones were kept


def test_images_options_reach_the_metrics(run, painter, data, network):
    def fid(*flags: object) -> Any:
        return json.loads(run("evaluate", painter, "--data", data, "-n", 8, "--json", *flags).out)["results"]

    base = fid()
    for flags in (
        ("--seed", 1),
        ("--labels", "2"),
        ("--labels", "none"),
        ("--no-denoise",),
        ("--split", "train"),
        ("--real", 15),
        ("--plan", "uniform", "--tol", 1.5),
        ("--guidance", 2, "--annealed"),
    ):
        assert fid(*flags)["fid"]["value"] != base["fid"]["value"], flags
    assert fid("--real", 15)["fid"]["real"] == 15
    assert fid("--batch", 3)["fid"]["value"] == pytest.approx(base["fid"]["value"], rel=1e-3)
    bits = fid("--metrics", "bpd", "--noise", "none")["bpd"]
    assert "as they are" in bits["note"]


def test_images_table(run, painter, data, network):
    asked = ("fid", "brisque", "bpd", "reconstruction", "paired")
    ran = run("evaluate", painter, "--data", data, "--metrics", *asked, "-n", 8)
    assert ran.status == 0
    lines = ran.out.splitlines()
    assert lines[0].split() == ["metric", "value", "better", "of"]
    for word in (
        "FID ",
        "KID ",
        "BRISQUE ",
        "bits per dim ",
        "reconstruction, mean square ",
        "paired distance ",
    ):
        assert sum(line.startswith(word) for line in lines[2:12]) == 1, word
    for words in ("FID is biased upwards", "(8 samples, 8 real images)", "lower is better, whatever arrow"):
        assert words in ran.out


def test_help_lists_every_metric(run):
    ran = run("evaluate", "--help")
    assert max(map(len, ran.out.splitlines())) <= 80
    for name, metric in METRICS.items():
        assert f"- {name}: {metric.help.split()[0]}" in ran.out


def both(*args: object) -> tuple[dict[str, Any], int, str]:
    """`jacobiflow ARGS --json` by two processes of torchrun: JSON, status, what it said."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "jacobiflow.cli.main"]
    with subprocess.Popen(
        [sys.executable, "-m", *torchrun, *map(str, args), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            out, err = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()  # which torchrun passes on to its processes
            raise
    return json.loads(out) if process.returncode == 0 else {}, process.returncode, err


@pytest.mark.slow
def test_two_processes(run, painter, data, tmp_path, monkeypatch):
    """The real command with the real network: the figures of one process."""
    asked = ("fid", "kid", "brisque", "bpd", "reconstruction", "paired")
    flags = ("evaluate", painter, "--data", data, "--metrics", *asked, "-n", 5, "--batch", 2)
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "two"))
    two, status, said = both(*flags)
    assert status == 0, said
    assert "measuring samples: 3, by each of 2 processes" in said
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "one"))
    one = json.loads(run(*flags, "--json").out)
    assert (one["processes"], two["processes"]) == (1, 2)
    for name, found in one["results"].items():
        for key, value in found.items():
            same = pytest.approx(value, rel=1e-4, abs=1e-4) if isinstance(value, float) else value
            assert two["results"][name][key] == same, (name, key)
    kept = [next((tmp_path / name / "features").iterdir()).name for name in ("one", "two")]
    assert kept[0] == kept[1]


@pytest.mark.slow
def test_two_processes_for_an_ising_model(run, small):
    two, status, said = both("evaluate", small, "-n", 201, "--batch", 50)
    assert status == 0, said
    one = json.loads(run("evaluate", small, "-n", 201, "--batch", 50, "--json").out)
    for key, value in one.items():
        if isinstance(value, float):
            assert two[key] == pytest.approx(value, rel=1e-4), key


@pytest.mark.slow
def test_two_processes_complain_once(painter):
    _, status, said = both("evaluate", painter, "--metrics", "fid")
    assert status != 0
    assert said.count("jacobiflow evaluate: fid needs real images: give --data") == 1
