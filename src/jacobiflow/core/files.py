"""Files: atomic writes, checks before a file is read, checksums."""

from __future__ import annotations

import errno
import math
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.results import JacobiflowError

MAX_TEXT_BYTES = 16 * 2**20  # bytes of a config, a plan, a recipe


class FileError(JacobiflowError, ValueError):
    """A file that is not safe to read."""


def write_atomically(
    path: Path, write: Callable[[str], object], *, mode: int | None = None, partial: Path | None = None
) -> None:
    """Call write(name of a private file), sync that file to the disk, and move it to `path` in one step.

    A reader sees the old content or the new one. mode: of the new file; None follows the umask. partial: the
    folder of the private file; None is the folder of `path`.
    """
    name = (partial or path.parent) / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with open(name, "xb") as file:
            final_mode = os.fstat(file.fileno()).st_mode if mode is None else mode
            os.fchmod(file.fileno(), 0o600)  # private until it is complete
        write(str(name))
        os.chmod(name, final_mode)
        sync(name)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            name.unlink()
        raise


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
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(info.st_mode) or info.st_size > max_bytes:
        limit = f" of at most {max_bytes // 2**20} MiB" if max_bytes < math.inf else ""
        raise FileError(f"it is not a plain file{limit}")


def read_text(path: Path) -> str:
    """The text of a plain file of at most 16 MiB."""
    check_plain(path, MAX_TEXT_BYTES)
    return path.read_text(encoding="utf-8")


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of all values, as 8 hex digits: finds accidental damage that safetensors does not notice."""
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
