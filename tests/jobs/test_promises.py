"""The page of promises names tests that exist, and the promises that have no test elsewhere."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import jacobiflow as jf
from jacobiflow.cli.main import main
from leftovers import SMALL
from soak import RECIPE

ROOT = Path(__file__).parents[2]


def test_every_named_test_exists() -> None:
    page = (ROOT / "docs/promises.md").read_text()
    named = set(re.findall(r"`(test_\w+)`", page))
    defined = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(named) > 30
    assert named <= defined, named - defined
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| ")][1:]
    assert all("`test_" in row[2] for row in rows if not row[1].strip().startswith("**"))


def test_no_network_unless_asked(flow: Any, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bundled model, a folder, a job and a training connect to nothing and look up no name."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the network was used")

    for name in ("connect", "connect_ex", "bind"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    jf.load("mnist-small").sample(1, seed=0)
    jf.load(flow[1]).sample(1, seed=0)
    assert job(tmp_path / "job", *SMALL)[0] == 0
    np.savez(tmp_path / "tiny.npz", x=np.arange(64 * 64, dtype=np.uint8).reshape(64, 8, 8))
    (tmp_path / "tiny.toml").write_text(RECIPE)
    flags = ("--data.source", str(tmp_path / "tiny.npz"), "--out", str(tmp_path / "run"))
    assert main(["train", str(tmp_path / "tiny.toml"), *flags]) == 0
