"""The cache folder: what is kept between runs, and read back only if nobody else can have changed it.

Compiled libraries run as the user, and stored plans decide what samples look like. So a folder is used
only if it belongs to the user and nobody else can write to it. Each of its parents must belong to the
user or to root, and be closed to others too, or have the sticky bit as /tmp has: whoever can write to
a parent can put another folder in its place. Access control lists need no test of their own, because
the group bits of a mode include them.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

_warned: set[str] = set()


def cache_folder() -> Path:
    """$JACOBIFLOW_CACHE, else `jacobiflow` in $XDG_CACHE_HOME or ~/.cache.

    This is the place only. Use `own_folder` to read or write there.
    """
    own = os.environ.get("JACOBIFLOW_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(shared or Path.home() / ".cache") / "jacobiflow"


def own_folder(name: str) -> Path | None:
    """The folder `name` in the cache folder, made if missing. None, and one warning, if it is not safe."""
    try:
        return _secured(Path(os.path.realpath(cache_folder() / name)))
    except OSError as error:
        where, reason = f"the cache folder {cache_folder()}", f"{error.filename}: {error.strerror}"
    except RuntimeError:  # Path.home: no $HOME, and an unknown user
        where, reason = "the cache folder", "the user has no home folder"
    warn_once(
        f"{where} is not used ({reason}): nothing is kept between runs; "
        "set JACOBIFLOW_CACHE to a folder that only you can write"
    )
    return None


def read_own(path: Path) -> bytes:
    """The content of a plain file that the user owns and nobody else can write; OSError for any other."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # a pipe would wait
    with open(os.open(path, flags), "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        if os.name == "posix" and (found.st_uid != os.geteuid() or found.st_mode & OTHERS_WRITE):
            raise PermissionError(errno.EPERM, "others can write to it", str(path))
        return file.read()


def write_own(path: Path, content: bytes) -> None:
    """Write a file that `read_own` reads, in one step: a reader gets the old content or the new one."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(number, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o600)  # the umask may have closed it to the user as well
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def warn_once(text: str) -> None:
    """Warn, unless this process has warned of the same."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)


def _secured(folder: Path) -> Path:
    """The folder (a path without links) if only the user can write to it; OSError says why not.

    Each parent is checked before anything is made in it. New folders have mode 0700, whatever the umask.
    """
    for path in (*reversed(folder.parents), folder):
        if not os.path.lexists(path):
            with suppress(FileExistsError):  # another process was faster
                os.mkdir(path, 0o700)
                os.chmod(path, 0o700)  # the umask may have closed it to the user as well
        _check(path, leaf=path == folder)
    return folder


def _check(path: Path, *, leaf: bool) -> None:
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
    if os.name != "posix":  # modes say nothing there, and home folders are closed to others
        return
    user = os.geteuid()
    if found.st_uid not in ({user} if leaf else {user, 0}):
        raise PermissionError(errno.EPERM, "it belongs to another user", str(path))
    if found.st_mode & OTHERS_WRITE and (leaf or not found.st_mode & stat.S_ISVTX):
        raise PermissionError(errno.EPERM, "others can write to it", str(path))
