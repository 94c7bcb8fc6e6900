"""The cache folder: files kept between runs, read back only if nobody else can have changed them.

Compiled libraries run as the user, and stored profiles decide what samples look like. So a folder is used only if it
belongs to the user and nobody else can write to it. Whoever can write to a parent can replace the folder, so each
parent must be closed to others too, or have the sticky bit as /tmp has, and belong to the user or to root. Access
control lists need no check of their own, because the group bits of a mode include them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from jacobiflow.core.files import write_bytes
from jacobiflow.core.results import warn_once


def cache_folder() -> Path:
    """The path $JACOBIFLOW_CACHE, else `jacobiflow` in $XDG_CACHE_HOME or ~/.cache; `own_folder` makes it safe."""
    if own := os.environ.get("JACOBIFLOW_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jacobiflow"


def own_folder(name: str) -> Path | None:
    """The folder `name` in the cache folder, made if missing. None, and one warning, if it is not safe.

    Each parent is checked before anything is made in it. New folders have mode 0700, whatever the umask.
    """
    try:
        folder = Path(os.path.realpath(cache_folder() / name))
        for path in (*reversed(folder.parents), folder):
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
