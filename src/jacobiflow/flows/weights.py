"""Weights as data: what shapes they have, and whether they have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

SAMPLED = 61  # numbers looked at in each tensor


def fingerprint(tensors: Iterable[Tensor]) -> tuple[Any, ...]:
    """Changes when a tensor is replaced, moved, cast or written to.

    Writes through `.data` leave no trace in a tensor's version, so a few numbers of each tensor
    are looked at as well: cheap, and enough for an optimiser's step or a swap of averaged weights.
    """
    found = list(tensors)
    with torch.no_grad():
        samples = [t.detach().reshape(-1)[:: max(1, t.numel() // SAMPLED)].double().sum() for t in found]
        sums = torch.stack(samples).tolist() if samples else []
    return tuple(
        (id(t), None if t.is_inference() else t._version, t.data_ptr(), repr(s))
        for t, s in zip(found, sums, strict=True)
    )


def digest(tensors: Mapping[str, Tensor], *more: str) -> str:
    """The same for the same names and numbers, in every process; `more` is hashed with them."""
    found = hashlib.sha256(repr(more).encode())
    for name, value in tensors.items():
        found.update(f"{name} {list(value.shape)} {value.dtype}".encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:32]


def linear_shapes(name: str, inputs: int, outputs: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of a linear layer."""
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)
