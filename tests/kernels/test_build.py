"""The C library: built once, checked before it is loaded, and never needed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from jacobiflow.kernels import build


@pytest.fixture(autouse=True)
def there() -> None:
    assert build.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a process that has not looked for the library yet, with an empty cache folder."""
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv("JACOBIFLOW_NATIVE", raising=False)
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    return tmp_path


def test_it_is_built_once(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(build, "announce", said.append)
    assert build.library() is not None
    (built,) = (fresh / "kept/native").iterdir()
    made = built.stat().st_mtime_ns
    assert build.library() is not None
    assert [(p, p.stat().st_mtime_ns) for p in (fresh / "kept/native").iterdir()] == [(built, made)]
    assert said == ["compiling the C kernels, once: this takes about ten seconds"]


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped", "foreign"])
def test_a_damaged_one_is_built_again(fresh: Path, damage: str) -> None:
    assert build.library() is not None
    (built,) = (fresh / "kept/native").iterdir()
    whole = built.read_bytes()
    middle = len(whole) // 2
    built.unlink()  # this process has it mapped
    built.write_bytes(
        {
            "empty": b"",
            "torn": whole[:middle],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
            "foreign": b"not a library",
        }[damage]
    )
    assert build.library() is not None
    assert [p.name for p in (fresh / "kept/native").iterdir()] == [built.name]
    again = built.read_bytes()
    assert hashlib.sha256(again[:-32]).digest() == again[-32:]


def test_no_folder_to_keep_it_in(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "kept").write_text("a file")
    monkeypatch.setenv("TMPDIR", str(fresh))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.warns(UserWarning, match="nothing is kept between runs"):
        assert build.library() is not None
    assert [path.name for path in fresh.iterdir()] == ["kept"]  # the private folder is gone
