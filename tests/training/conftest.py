"""A recipe that trains in a second, and what its runs leave behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jacobiflow.cli.main import main
from soak import MODEL

RECIPE = f"""
about = "8 x 8 images of two classes."
{MODEL}
family = "tarflow"
num_classes = 2

[data]
source = '{{source}}'
validation = 0.17  # 80 of 96 are left

[training]
epochs = 2
batch_size = 16
lr = 1e-2
warmup_epochs = 0.5
clip = 1.0
label_drop = 0.2
flip = true
log_every = 1
save_every = 7
sample_every = 0
"""


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A TOML file, with its data beside it: 5 steps per epoch."""
    folder = tmp_path_factory.mktemp("tiny")
    draw = np.random.default_rng(0)
    y = np.arange(96) % 2
    x = draw.integers(0, 60, (96, 8, 8)) + 150 * y[:, None, None] * (np.arange(8) > 3)
    np.savez(folder / "tiny.npz", x=x.astype(np.uint8), y=y)
    path = folder / "tiny.toml"
    path.write_text(RECIPE.format(source=folder / "tiny.npz"))
    return path


Train = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="session")
def train(recipe: Path) -> Train:
    """train(out, "--flag", value, ...) runs the command in this process; returns the lines of its log."""

    def run(out: Path, *flags: object, recipe: Path | str = recipe) -> list[dict[str, Any]]:
        assert main(["train", str(recipe), "--out", str(out), *map(str, flags)]) == 0
        return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]

    return run


@pytest.fixture
def refusal(recipe: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """refusal("--flag", value, ...) is the one line with which the command refuses."""

    def run(*flags: object, recipe: Path | str = recipe) -> str:
        capsys.readouterr()
        assert main(["train", str(recipe), *map(str, flags)]) == 2
        *before, last = capsys.readouterr().err.splitlines()
        known = (" parameters, ", " steps on ", " steps, ", "resuming", ": images are ")
        assert all(any(words in line for words in known) for line in before)
        return last.removeprefix("jacobiflow train: ")

    return run
