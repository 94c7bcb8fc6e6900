"""Files that several layers write: atomic writes and checksums."""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor


def write_atomically(path: Path, write: Callable[[str], object]) -> None:
    """Call write(name of a private file beside `path`), then move it to `path` in one step."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(name, "xb") as f:
            mode = os.fstat(f.fileno()).st_mode
            os.fchmod(f.fileno(), 0o600)  # until it is whole
        write(str(name))
        os.chmod(name, mode)
        with open(name, "rb") as f:
            os.fsync(f.fileno())
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            name.unlink()
        raise


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Finds damage by accident, in files that safetensors itself takes for whole."""
    found = 0
    for name in sorted(tensors):
        found = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"
