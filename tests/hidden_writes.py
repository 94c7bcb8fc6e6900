"""Ways to change one number of a weight that leave no trace in its version."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

Write = Callable[[int, float], None]  # the number at a place of the flattened weight


def _data(weight: nn.Parameter, folder: Path) -> Write:
    return lambda i, value: weight.data.view(-1).__setitem__(i, value)


def _numpy(weight: nn.Parameter, folder: Path) -> Write:
    numbers = weight.detach().numpy().reshape(-1)
    return lambda i, value: numbers.__setitem__(i, value)


def _swap(weight: nn.Parameter, folder: Path) -> Write:
    def write(i: int, value: float) -> None:
        other = nn.Parameter(weight.detach().clone())
        other.data.view(-1)[i] = value
        torch.utils.swap_tensors(weight, other)

    return write


def _mapped(weight: nn.Parameter, folder: Path) -> Write:
    """Through another mapping of the file that holds the weight."""
    path, numbers = folder / "weight.bin", weight.detach().numpy()
    numbers.tofile(path)
    weight.data = torch.from_numpy(np.memmap(path, numbers.dtype, "r+", shape=numbers.shape))
    other = np.memmap(path, numbers.dtype, "r+", shape=(numbers.size,))
    return lambda i, value: other.__setitem__(i, value)


def _from_file(weight: nn.Parameter, folder: Path) -> Write:
    """By ordinary writes to the file."""
    path, numbers = folder / "weight.bin", weight.detach().numpy()
    numbers.tofile(path)
    held = torch.from_file(str(path), shared=True, size=numbers.size, dtype=weight.dtype)
    weight.data = held.view_as(weight)

    def write(i: int, value: float) -> None:
        with path.open("r+b") as file:
            file.seek(i * numbers.itemsize)
            file.write(np.array(value, numbers.dtype).tobytes())

    return write


WAYS: dict[str, Callable[[nn.Parameter, Path], Write]] = {
    "data": _data,
    "numpy": _numpy,
    "swap_tensors": _swap,
    "memmap": _mapped,
    "from_file": _from_file,
}
