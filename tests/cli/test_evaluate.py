"""`jacobiflow evaluate`, in this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import jacobiflow as jf
from jacobiflow.data.ising import Ising


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """N(0, K) for a 3 x 3 torus."""
    folder = tmp_path_factory.mktemp("small")
    flow = jf.MAF(jf.MAFConfig(features=9, blocks=1, hidden=(8,), linear=True))
    target = Ising(side=3, temperature=12.0)
    flow.linear.copy_(target.root())
    flow.target = target.to_dict()
    flow.save(folder)
    return folder


def test_json(run, small):
    doc = json.loads(run("evaluate", small, "-n", 500, "--json").out)
    target = Ising(side=3, temperature=12.0)
    assert doc["metrics"] == ["ising"]
    assert doc["target"] == target.to_dict()
    assert (doc["samples"], doc["not_finite"], doc["seed"]) == (500, 0, 0)
    assert doc["versions"] == {"jacobiflow": jf.__version__, "torch": torch.__version__}
    assert doc["exact_log_z"] == target.log_z()
    assert doc["exact_energy_per_site"] == target.exact_energy()
    for name in ("energy_per_site", "abs_magnetization", "effective_sample_size", "log_z_bound"):
        assert doc[f"{name}_error"] > 0
    assert 0 < doc["effective_sample_size"] < 1
    assert doc["log_z_bound"] < doc["exact_log_z"]
    assert doc["monte_carlo_abs_magnetization_error"] < 0.01
    same = json.loads(
        run("evaluate", small, "-n", 500, "--json", "--metrics", "ising", "--plan", "sequential").out
    )
    assert same["log_z_bound"] == pytest.approx(doc["log_z_bound"], abs=1e-3)
    other = json.loads(run("evaluate", small, "-n", 500, "--json", "--seed", 1).out)
    assert other["energy_per_site"] != doc["energy_per_site"]


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
        (("mnist",), "no metric is known for mnist: choose with --metrics, of ising"),
        (("mnist", "--metrics", "fidelity"), "--metrics knows ising, not 'fidelity'"),
        (("mnist", "-n", "1"), "-n must be 2 or more"),
        (("mnist", "--plan", "fast"), "no plan is called 'fast'"),
        (("nothing",), "no model 'nothing'"),
    ],
)
def test_refusals(run, flags, said):
    assert said in run("evaluate", *flags).complaint


def test_a_target_that_makes_no_sense(run, small, tmp_path):
    flow = jf.load(small)
    flow.target = {"kind": "ising", "side": 0}
    flow.save(tmp_path / "a")
    assert "target.side must be 2 or more" in run("evaluate", tmp_path / "a").complaint
    path = tmp_path / "a" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"target": 3}))
    assert "target must be a table, not 3" in run("evaluate", tmp_path / "a").complaint
