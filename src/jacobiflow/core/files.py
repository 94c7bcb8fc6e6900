"""Files: atomic writes, checks before a file is read, checksums, and a cache folder that only the user can change.

Compiled libraries run as the user, and stored profiles decide what samples look like. So a cache folder must belong
to the user, and nobody else may write to it or replace it: each parent belongs to the user or to root, and is closed
to others or has the sticky bit as /tmp has. The group bits of a mode include access control lists.
"""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import re
import secrets
import stat
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jacobiflow.core.results import JacobiflowError, one_line, warn_once

STATE = "state.safetensors"  # of a training
STATE_ERRORS = (OSError, SafetensorError, KeyError, TypeError, RuntimeError, ValueError)  # of one that is damaged
LEFTOVER_SECONDS = 3600.0  # no write takes longer
MAX_TEXT_BYTES = 16 * 2**20  # bytes of a config, a plan, a recipe


class FileError(JacobiflowError, ValueError):
    """A file that is not safe to read, or that cannot be written."""


def write_atomically(
    path: Path, write: Callable[[str], object], *, mode: int = 0o666, partial: Path | None = None
) -> None:
    """Call write(name of a private file), sync it to the disk, and move it to `path`: readers see old or new content.

    mode: of the new file, as the umask lets it. partial: the folder of the private file; None is the folder of `path`,
    where leftovers of killed writes go an hour later.
    """
    name = (partial or path.parent) / f".{path.name}.{secrets.token_hex(8)}"
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        allowed = os.stat(name).st_mode  # safetensors writes files that only the user can read
        try:
            write(str(name))
        except SafetensorError as error:  # it has errors of its own for a full disk
            number = int((re.findall(r"os error (\d+)", str(error)) or [errno.EIO])[0])
            raise OSError(number, os.strerror(number), str(path)) from None
        os.chmod(name, allowed)
        sync(name)
        os.replace(name, path)
    except BaseException as error:
        with suppress(OSError):
            name.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(name)) and error.filename2 is None:
            error.filename = str(path)  # users do not know the private file
        raise
    if partial is None:
        remove_leftovers(path.parent, glob.escape(path.name), LEFTOVER_SECONDS)


def remove_leftovers(folder: Path, name: str = "*", seconds: float = 0.0) -> None:
    """Remove the private files, of at least this age, that killed writes of files `name` left in `folder`."""
    for path in folder.glob(f".{name}.{'[0-9a-f]' * 16}"):
        with suppress(OSError):  # another process was faster
            if path.stat().st_mtime <= time.time() - seconds:
                path.unlink()


@contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """A full or closed disk as one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise FileError(f"cannot write into {folder}: {reason}: fix that and rerun the command to resume") from None


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, **options: Any) -> None:
    """Write a file atomically; `options` are those of `write_atomically`."""
    write_atomically(path, lambda name: Path(name).write_bytes(content), **options)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_plain(path: Path, max_bytes: float = math.inf) -> None:
    """Reject pipes, devices and files over `max_bytes`: reading them might never end."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode) or info.st_size > max_bytes:
        limit = f" of at most {max_bytes // 2**20} MiB" if max_bytes < math.inf else ""
        raise FileError(f"it is not a plain file{limit}")


def read_text(path: Path) -> str:
    """The text of a plain file of at most 16 MiB."""
    check_plain(path, MAX_TEXT_BYTES)
    return path.read_text(encoding="utf-8")


def read_state(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a training says of the state that it saved, and its tensors; STATE_ERRORS if it is damaged."""
    check_plain(path)
    with safe_open(path, framework="pt") as f:
        about = json.loads(f.metadata()["about"])
        tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
    stored = about.pop("checksum")
    if stored != checksum(tensors, json.dumps(about) if "version" in about else ""):  # 1: values only
        raise ValueError("its checksum is wrong")
    return about, tensors


def checksum(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """CRC-32 of a text and all values, as 8 hex digits: finds damage that safetensors does not notice."""
    crc = zlib.crc32(text.encode())
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"


def cache_folder() -> Path:
    """The path $JACOBIFLOW_CACHE, else `jacobiflow` in $XDG_CACHE_HOME or ~/.cache; `own_folder` makes it safe."""
    if own := os.environ.get("JACOBIFLOW_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jacobiflow"


def own_folder(name: str) -> Path | None:
    """The folder `name` in the cache folder, made if missing. None, and one warning, if it is not safe."""
    try:
        folder = Path(os.path.realpath(cache_folder() / name))
        for path in (*reversed(folder.parents), folder):  # each is checked before anything is made in it
            if not os.path.lexists(path):
                with suppress(FileExistsError):  # another process was faster
                    os.mkdir(path, 0o700)
                    os.chmod(path, 0o700)  # the umask may have closed it to the user as well
            _check(path, path.lstat(), stat.S_ISDIR, leaf=path == folder)
        return folder
    except OSError as error:
        where, reason = f"the cache folder {cache_folder()}", f"{error.filename}: {error.strerror}"
    except RuntimeError:  # Path.home: no $HOME, and an unknown user
        where, reason = "the cache folder", "the user has no home folder"
    advice = "set JACOBIFLOW_CACHE to a folder that only you can write"
    warn_once(f"{where} is not used ({reason}): nothing is kept between runs; {advice}", where)
    return None


def read_own(path: Path) -> bytes:
    """The content of a plain file that the user owns and nobody else can write; OSError for any other."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait
    with open(os.open(path, flags), "rb") as file:
        _check(path, os.fstat(file.fileno()), stat.S_ISREG, leaf=True)
        return file.read()


def write_own(path: Path, content: bytes) -> None:
    """Write a file that `read_own` reads, atomically."""
    write_bytes(path, content, mode=0o600)


def _check(path: Path, info: os.stat_result, is_kind: Callable[[int], bool], *, leaf: bool) -> None:
    """OSError unless the path is of this kind and nobody but the user can write to it; parents: see above."""
    if not is_kind(info.st_mode):
        wrong = "it is not a folder" if is_kind is stat.S_ISDIR else "it is not a plain file"
        raise OSError(errno.EINVAL, wrong, str(path))
    if os.name != "posix":  # modes mean nothing there, and home folders are closed to others
        return
    if info.st_uid != os.geteuid() and (leaf or info.st_uid):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    sticky = not leaf and info.st_mode & stat.S_ISVTX
    if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        raise PermissionError(errno.EPERM, "others can write to it", str(path))
