"""Reverse KL: gradients along samples, runs by recipe."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.cli import train as command
from jacobiflow.cli.main import main
from jacobiflow.core.processes import World
from jacobiflow.flows.flow import standard_normal
from jacobiflow.training.loop import Trainer
from jacobiflow.training.recipe import Recipe
from jacobiflow.training.train import build_flow, load_for
from jacobiflow_lab.lattice.ising import Ising
from jacobiflow_lab.lattice.lattice_flow import LatticeConfig, reverse_kl
from running import Run
from subjects import maf

RECIPE = """
[model]
family = "lattice"
features = 9
temperature = 5.0
blocks = 1
hidden = [16]
transform = "spline"
activation = "silu"
order = "same"
reach = 1
linear = true

[training]
epochs = 0.6
batch_size = 32
lr = 1e-2
warmup_epochs = 0.05
clip = 1.0
log_every = 10
sample_every = 0
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ising") / "tiny.toml"
    path.write_text(RECIPE)
    return path


class Known:
    """A target that is a flow's own density."""

    def __init__(self, flow: jf.Flow) -> None:
        self.flow = copy.deepcopy(flow).requires_grad_(False)

    def log_density(self, x: Tensor) -> Tensor:
        return self.flow.log_prob(x)


def gradients(flow: jf.Flow, loss: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(flow.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def test_at_its_target_a_flow_stays() -> None:
    """Not on average only: the gradient along the samples is zero for each of them."""
    flow = maf(1.0, features=6, blocks=2).double()
    z = flow.noise(5, seed=0)
    loss = reverse_kl(flow, Known(flow), z, 1e-13)  # type: ignore[arg-type]
    assert abs(loss.item()) < 1e-12
    assert gradients(flow, loss).abs().max() < 1e-10


def test_the_gradient_is_that_of_reverse_kl() -> None:
    """On average the same as of log q(x) - log p(x) with log q through the log-det."""
    flow, target = maf(0.3, features=4, blocks=1, hidden=(8,)).double(), Ising(side=2)
    z = flow.noise(8000, seed=0)
    loss = reverse_kl(flow, target, z, 1e-10)
    found = gradients(flow, loss)
    out = flow.decode(z, differentiable=True)
    full = (standard_normal(z) - out.log_det - target.log_density(out.x)).mean() / 4
    assert loss.item() == pytest.approx(full.item(), rel=1e-9)
    expected = gradients(flow, full)
    assert (found - expected).norm() < 0.15 * expected.norm()


def trainer(path: Path, out: Path, **training: Any) -> Trainer:
    recipe = Recipe.load(path)
    recipe = replace(recipe, training=replace(recipe.training, **training))
    torch.manual_seed(0)
    return Trainer(recipe, build_flow(recipe.model), *load_for(recipe), out, World())


def test_parts_of_a_batch_make_the_same_step(tiny: Path, tmp_path: Path) -> None:
    whole, parts = trainer(tiny, tmp_path), trainer(tiny, tmp_path, accumulate=4)
    for i in range(3):
        a, b = whole.step(i, torch.arange(32)), parts.step(i, torch.arange(32))
        assert a == pytest.approx(b, rel=1e-4)


def test_a_run_learns_and_its_model_says_what_for(tiny: Path, tmp_path: Path, run: Run) -> None:
    assert run("train", tiny, "--out", tmp_path).status == 0
    log = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    first, last = log[0]["loss"], log[-1]["validation"]
    exact = -Ising(side=3, temperature=5.0).log_z() / 9
    assert exact < last < exact + 0.01 < first  # the loss bounds -log Z / N from above
    flow = jf.load(tmp_path / "model")
    assert flow.config.ising() == Ising(side=3, temperature=5.0)


def test_a_stopped_run_is_the_same_in_the_end(tiny: Path, tmp_path: Path) -> None:
    whole = trainer(tiny, tmp_path, epochs=0.1)
    for i in range(4):
        whole.step(i, torch.arange(32))
    whole.state.save(4)
    for i in range(4, 10):
        whole.step(i, torch.arange(32))
    rest = trainer(tiny, tmp_path, epochs=0.1)
    rest.run()
    for a, b in zip(whole.flow.parameters(), rest.flow.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_picture_shows_mean_spins(tiny: Path, tmp_path: Path) -> None:
    subject = trainer(tiny, tmp_path)
    subject.picture(1)
    assert (tmp_path / "samples" / "step-0000001.png").exists()


def test_overrides_reach_the_ising_model(tiny: Path, tmp_path: Path, run: Run) -> None:
    flags = ("--model.temperature", 7, "--training.epochs", 0.02)
    assert run("train", tiny, "--out", tmp_path, *flags).status == 0
    assert jf.load(tmp_path / "model").config.temperature == 7


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model.features", 12, "--model.reach", 0), "needs a square number of features"),
        (("--model.temperature", -1), "temperature must be positive"),
        (("--data.source", "mnist.npz"), "a lattice flow learns without data: leave data.source empty"),
        (("--training.tol", -1), "training.tol must be 0 or more"),
    ],
)
def test_refusals(tiny: Path, run: Run, flags: tuple[object, ...], said: str) -> None:
    assert said in run("train", tiny, *flags).complaint


def test_a_flow_of_no_ising_model_cannot_learn(tiny: Path, tmp_path: Path, run: Run) -> None:
    ran = run("train", tiny, "--model.temperature", 0, "--out", tmp_path)
    assert ran.status == 2
    assert "temperature must be positive, not 0.0" in ran.err


def test_the_lab_brings_its_recipes() -> None:
    for name, blocks in (("ising", 2), ("ising-maf", 8)):
        recipe = Recipe.load(name)
        assert recipe.model.ising() == Ising(side=16, temperature=3.0)
        assert recipe.model.blocks == blocks
        assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_every_field_is_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Recipe] = []
    monkeypatch.setattr(command, "train", lambda recipe, *_, **__: seen.append(recipe))
    options = {"reach": 1, "features": 36, "temperature": 2.0, "shift": 4.0, "order": "classes", "blocks": 3}
    flags = [word for name, value in options.items() for word in (f"--model.{name}", str(value))]
    assert main(["train", "ising", *flags, "--model.no-linear"]) == 0
    assert seen[0].model == replace(Recipe.load("ising").model, linear=False, **options)
    assert isinstance(seen[0].model, LatticeConfig)
