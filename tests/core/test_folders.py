"""What is kept between runs is read back only if nobody else can have changed it."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jacobiflow.core import files as folders
from jacobiflow.core import results
from jacobiflow.kernels import build

PLANTED = """
#include <stdio.h>
__attribute__((constructor)) static void run(void) { FILE *f = fopen(MARK, "w"); if (f) fclose(f); }
"""


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, built once for this file."""
    out = tmp_path_factory.mktemp("prebuilt") / "kernels.so"
    flags = ["-O1", *build.FLAGS[1:]]
    subprocess.run(["cc", *flags, *build.SOURCES, "-o", str(out), "-lm", "-lpthread"], check=True)
    return out


@dataclass
class Room:
    """A process that has not looked for the library yet, and a cache folder that is not there yet."""

    cache: Path
    path: Path  # where the library is kept
    log: Path
    mark: Path
    planted: bytes

    @property
    def builds(self) -> int:
        """How often the compiler was called."""
        return len(self.log.read_text()) if self.log.exists() else 0

    def plant(self) -> None:
        """A library that leaves a mark when it is loaded, with a checksum that is right."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.parent.chmod(0o700)
        self.path.write_bytes(self.planted + hashlib.sha256(self.planted).digest())
        self.path.chmod(0o600)


@pytest.fixture
def room(prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    (tmp_path / "planted.c").write_text(PLANTED)
    mark, planted, cc = (tmp_path / name for name in ("mark", "planted.so", "cc"))
    define = f'-DMARK="{mark}"'
    command = ["cc", "-shared", "-fPIC", define, str(tmp_path / "planted.c"), "-o", str(planted)]
    subprocess.run(command, check=True)
    log = tmp_path / "builds"
    cc.write_text(f'#!/bin/sh\nprintf x >> "{log}"\nwhile [ "$1" != -o ]; do shift; done\ncp "{prebuilt}" "$2"\n')
    cc.chmod(0o700)
    monkeypatch.setenv("CC", str(cc))
    monkeypatch.delenv("JACOBIFLOW_NATIVE", raising=False)
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "first"))
    assert build.library() is not None
    (name,) = (path.name for path in (tmp_path / "first/native").iterdir())
    log.unlink()
    cache = tmp_path / "above" / "cache"
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(cache))
    return Room(cache, cache / "native" / name, log, mark, planted.read_bytes())


def another_user(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


UNSAFE: dict[str, Callable[[Room, pytest.MonkeyPatch], object]] = {
    "anyone writes": lambda room, _: room.path.parent.chmod(0o777),
    "anyone writes, sticky": lambda room, _: room.path.parent.chmod(0o1777),
    "the group writes": lambda room, _: room.path.parent.chmod(0o770),
    "anyone writes to its parent": lambda room, _: room.cache.chmod(0o777),
    "the group writes above": lambda room, _: room.cache.parent.chmod(0o775),
    "of another user": another_user,
}


@pytest.mark.parametrize("kind", UNSAFE)
def test_a_library_in_an_unsafe_folder_is_not_loaded(room: Room, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    room.plant()
    UNSAFE[kind](room, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [build.library() for _ in range(2)]
    assert not room.mark.exists()
    assert None not in found
    (warning,) = caught
    assert str(warning.message).startswith(f"the cache folder {room.cache} is not used (")
    assert room.builds == 2
    assert list(room.path.parent.iterdir()) == [room.path]  # nothing is written there either


def test_two_folders_in_one_unsafe_folder_are_one_warning(room: Room) -> None:
    room.cache.mkdir(parents=True)
    room.cache.chmod(0o777)
    with pytest.warns(UserWarning, match="others can write to it") as caught:
        found = [folders.own_folder(name) for name in ("native", "plans")]
    assert found == [None, None]
    assert len(caught) == 1
    assert list(room.cache.iterdir()) == []


def as_link(path: Path) -> None:
    path.symlink_to(path.rename(path.parent.parent / "elsewhere.so"))


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


FILES: dict[str, Callable[[Path], object]] = {
    "a link": as_link,
    "a pipe": as_pipe,
    "anyone writes": lambda path: path.chmod(0o666),
    "the group writes": lambda path: path.chmod(0o660),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_library_that_others_can_change_is_built_again(room: Room, kind: str) -> None:
    room.plant()
    FILES[kind](room.path)
    found = build.library()
    assert not room.mark.exists()
    assert found is not None
    assert room.builds == 1
    assert stat.S_IMODE(room.path.lstat().st_mode) == 0o600
    assert build.library() is not None
    assert room.builds == 1  # the new one was kept


def test_a_file_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.write_own(tmp_path / "file", b"content")
    assert folders.read_own(tmp_path / "file") == b"content"
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(PermissionError):
        folders.read_own(tmp_path / "file")


def test_a_library_that_is_swapped_after_the_check_is_not_loaded(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ctypes.CDLL

    def swapped(name: str) -> Any:
        room.path.unlink(missing_ok=True)
        room.plant()
        return load(name)

    monkeypatch.setattr(build.ctypes, "CDLL", swapped)
    found = build.library()
    assert not room.mark.exists()
    assert found is not None


CUT = """
import os, sys, torch
from jacobiflow.kernels import build
assert build.library() is not None
os.truncate(sys.argv[1], 100)
z, theta, x, slope = torch.ones(2, 3, 4), torch.zeros(2, 3, 8), torch.empty(2, 3, 4), torch.empty(2, 3, 4)
ends = theta.data_ptr(), x.data_ptr(), slope.data_ptr()
build.library().jf_affine(0, 0.0, 2, 3, 4, z.data_ptr(), z.stride(0), *ends)
assert torch.equal(x, z)
"""


@pytest.mark.slow
def test_a_library_that_is_cut_short_while_in_use(room: Room) -> None:
    for builds in (1, 2):  # the second process finds the file cut short
        done = subprocess.run([sys.executable, "-c", CUT, room.path], check=False)
        assert (done.returncode, room.builds) == (0, builds)


def test_without_files_in_memory(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on other systems than Linux: a private copy, which is gone afterwards."""
    monkeypatch.delattr(os, "memfd_create")
    temp = room.log.with_name("temp")
    temp.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temp))
    for _ in range(2):
        found = build.library()
        assert found is not None
        assert Path(found._name).is_relative_to(temp)
        assert list(temp.iterdir()) == []
    assert room.builds == 1


# Folders that are used


def test_a_sticky_parent_is_safe(room: Room) -> None:
    room.cache.mkdir(parents=True)
    room.cache.parent.chmod(0o1777)  # as /tmp
    assert folders.own_folder("native") == room.cache / "native"


def test_a_link_to_a_safe_folder(room: Room, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    room.cache.parent.mkdir()
    room.cache.symlink_to(tmp_path / "disk")
    assert folders.own_folder("native") == tmp_path / "disk" / "native"
    (tmp_path / "disk").chmod(0o777)
    with pytest.warns(UserWarning, match=f"{tmp_path / 'disk'}: others can write to it"):
        assert folders.own_folder("native") is None


@pytest.fixture(params=[0o000, 0o002, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def test_the_umask_does_not_open_what_is_kept(room: Room, umask: None) -> None:
    for _ in range(2):
        assert build.library() is not None
    assert room.builds == 1
    for path, mode in ((room.cache.parent, 0o700), (room.cache, 0o700), (room.path.parent, 0o700)):
        assert stat.S_IMODE(path.stat().st_mode) == mode, path
    assert stat.S_IMODE(room.path.stat().st_mode) == 0o600


def test_no_home_is_one_warning(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """$HOME is not set and the user is unknown, as in some containers."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("JACOBIFLOW_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(results, "_warned", set())
    with pytest.warns(UserWarning, match="the user has no home folder") as caught:
        library, plans = build.library(), folders.own_folder("plans")
    assert library is not None
    assert plans is None
    assert len(caught) == 1


def test_a_folder_that_is_not_safe_is_one_warning(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("native", "costs"):
        (room.cache / name).mkdir(parents=True)
        (room.cache / name).chmod(0o777)
    monkeypatch.setattr(results, "_warned", set())
    with pytest.warns(UserWarning, match="native: others can write to it") as caught:
        assert [folders.own_folder(name) for name in ("native", "costs")] == [None, None]
    assert len(caught) == 1


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders.write_own(tmp_path / "file", b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    for path in (tmp_path / "file", tmp_path / "missing" / "file"):
        with pytest.raises(OSError, match=f"(no space left|No such file or directory): '{path}'$"):
            folders.write_own(path, b"new")
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("file", b"old")]
