"""Small models and what their jobs leave behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jacobiflow as jf
from jacobiflow.cli.main import main
from subjects import tarflow


@pytest.fixture(scope="session")
def flow(tmp_path_factory: pytest.TempPathFactory) -> tuple[jf.Flow, Path]:
    """A flow of three classes and its folder."""
    folder = tmp_path_factory.mktemp("model")
    tarflow(0.25, num_classes=3).save(folder)
    return jf.load(folder), folder


Job = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job(flow: tuple[jf.Flow, Path], capsys: pytest.CaptureFixture[str]) -> Job:
    """job(out, "-n", 20, ...) is `jacobiflow sample` as a job in this process: status and what it said."""

    def call(out: Path, *flags: object, model: Any = flow[1]) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(["sample", str(model), *map(str, flags), "--out", str(out)])
        return status, *capsys.readouterr()

    return call
