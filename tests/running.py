"""Running commands inside the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from jacobiflow.cli.main import main


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    status: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of a user's error."""
        assert self.status == 2
        assert self.out == ""
        assert self.err.endswith("\n")
        lines = [line for line in self.err.splitlines() if not line.startswith(("decoding ", "measuring "))]
        assert len(lines) == 1, self.err
        assert "Traceback" not in self.err
        assert len(lines[0]) < 400
        return lines[0]


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run("sample", "mnist", "-n", 4)` is `jacobiflow sample mnist -n 4` on a terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("JACOBIFLOW_TRACEBACK", raising=False)

    def call(*args: object) -> Ran:
        capsys.readouterr()
        status = main([str(a) for a in args])
        return Ran(status, *capsys.readouterr())

    return call
