"""Small models and what their jobs leave behind."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jacobiflow as jf
from jacobiflow.cli import sample
from jacobiflow.cli.main import main
from leftovers import SMALL
from subjects import tarflow


@pytest.fixture(scope="session")
def flow(tmp_path_factory: pytest.TempPathFactory) -> tuple[jf.Flow, Path]:
    """A flow of three classes and its folder."""
    folder = tmp_path_factory.mktemp("model")
    tarflow(0.25, num_classes=3).save(folder)
    return jf.load(folder), folder


@pytest.fixture(scope="module")
def whole(flow: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished job of SMALL."""
    out = tmp_path_factory.mktemp("whole") / "out"
    assert sample.main([str(flow[1]), *SMALL, "--out", str(out)]) == 0
    return out


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(whole, tmp_path / "out")


Job = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job(flow: tuple[jf.Flow, Path], capsys: pytest.CaptureFixture[str]) -> Job:
    """job(out, "-n", 20, ...) is `jacobiflow sample` as a job in this process: status and what it said."""

    def call(out: Path, *flags: object, model: Any = flow[1]) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["sample", str(model), *map(str, flags), "--out", str(out)])
        return status, *capsys.readouterr()

    return call
