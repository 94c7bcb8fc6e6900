"""Building the C kernels: which compiler, and what is said where there is none."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from jacobiflow.core import results
from jacobiflow.kernels import build

COST = "so decoding runs in torch, several times slower"
REMEDY = "install a C compiler or set CC, or set JACOBIFLOW_NATIVE=0 to silence this"


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a process that has not looked for the library yet; where it would be kept."""
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv("JACOBIFLOW_NATIVE", raising=False)
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    monkeypatch.setattr(results, "_warned", set())
    return tmp_path / "kept/native"


def warned() -> list[str]:
    """What a process says that asks for the library twice and gets none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert build.library() is None
        assert build.version() == "torch"
    return [str(w.message) for w in caught]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (text,) = warned()
    assert text == f"the C kernels are not used (no C compiler was found), {COST}: {REMEDY}"


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: Path) -> None:
    cc = tmp_path / "cc"
    cc.write_text("#!/bin/sh\necho 'In file x.c' >&2\necho 'x.c:1: error: no y.h' >&2\nexit 1\n")
    cc.chmod(0o700)
    monkeypatch.setenv("CC", str(cc))
    (text,) = warned()
    reason = f"they could not be built: {cc} failed, x.c:1: error: no y.h"
    assert text == f"the C kernels are not used ({reason}), {COST}: {REMEDY}"
    assert not list(kept.iterdir())


@pytest.mark.parametrize("cc", ["/nowhere/cc", 'gcc "-O2', "/bin/false"])
def test_a_wrong_compiler(monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    monkeypatch.setenv("CC", cc)
    (text,) = warned()
    assert text.startswith("the C kernels are not used (they could not be built: ")
    assert text.endswith(f"{COST}: {REMEDY}")
    assert "\n" not in text


@pytest.mark.parametrize("cc", [None, "/nowhere/cc"])
def test_switched_off(monkeypatch: pytest.MonkeyPatch, cc: str | None) -> None:
    monkeypatch.setenv("JACOBIFLOW_NATIVE", "0")
    if cc is not None:
        monkeypatch.setenv("CC", cc)
    assert warned() == []


def test_a_compiler_with_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: Path) -> None:
    """CC="gcc -O2", as build systems set it."""
    real, seen = build.compiler_command()[0], tmp_path / "seen"
    cc = tmp_path / "my cc"
    cc.write_text(f'#!/bin/sh\necho "$1" > {seen}\nexec {real} "$@"\n')
    cc.chmod(0o700)
    monkeypatch.setenv("CC", f"'{cc}' -O2")
    assert build.library() is not None
    assert seen.read_text() == "-O2\n"
    (built,) = kept.iterdir()
    assert build.version() == built.stem
    monkeypatch.setenv("CC", f"'{cc}' -O1")
    assert build.library() is not None  # other arguments are another library
    assert len(os.listdir(kept)) == 2
