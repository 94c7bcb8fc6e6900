"""Weights as data: what shapes they have, whether they fit, and whether they have changed."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from jacobiflow.core.memory import SizeError, refuse

SAMPLED = 61  # numbers looked at in each tensor
MOST = 100_000  # tensors of a model
T = TypeVar("T")


class Watch:
    """Notices when tensors are replaced, moved, cast or written to.

    Writes through `.data` leave no trace in a tensor's version, so a few numbers of each tensor
    are looked at as well: cheap, and enough for an optimiser's step or a swap of averaged weights.
    """

    def __init__(self) -> None:
        self._places: list[tuple[int, int, torch.dtype]] = []
        self._seen: tuple[list[int | None], float] | None = None
        self._samples: list[Tensor] = []
        self._ramp = torch.empty(0)
        self._made: Any = None
        self._lock = threading.Lock()

    def changed(self, tensors: Iterable[Tensor]) -> bool:
        """Whether anything is different from the last look; the first look says yes."""
        with self._lock, torch.no_grad():
            return self._changed(list(tensors))

    def fresh(self, tensors: Iterable[Tensor], make: Callable[[], T]) -> T:
        """What `make` makes of these tensors, made again only when they have changed.

        Threads wait for the one that makes it: none is left with what was made of older weights.
        """
        with self._lock, torch.no_grad():
            if self._changed(list(tensors)):
                seen, self._seen = self._seen, None  # should `make` fail, the next look says yes
                self._made = make()
                self._seen = seen
            return self._made  # type: ignore[no-any-return]

    def _changed(self, found: list[Tensor]) -> bool:
        places = [(id(t), t.data_ptr(), t.dtype) for t in found]
        if places != self._places:
            self._places, self._seen = places, None
            self._samples = [t.detach().reshape(-1)[:: max(1, t.numel() // SAMPLED)] for t in found]
            count = sum(map(len, self._samples))
            self._ramp = 1 + torch.arange(count, dtype=torch.float64) % 997
        numbers = torch.cat(self._samples).to("cpu", torch.float64) if found else self._ramp
        now = (
            [None if t.is_inference() else t._version for t in found],
            float((numbers * self._ramp).sum()),
        )  # not @: its threads would spin on
        before, self._seen = self._seen, now
        return before is None or repr(before) != repr(now)  # a NaN equals itself here

    def __reduce__(self) -> Any:
        return Watch, ()  # copies look for themselves


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


def check_size(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
    """Refuse a model that this machine cannot hold, before any of it is made."""
    found = list(islice(shapes, MOST + 1))
    size = torch.get_default_dtype().itemsize * sum(math.prod(shape) for _, shape in found)
    refuse("a model of this config", size, "make it smaller")
    if len(found) > MOST:
        raise SizeError(f"a model of this config has more than {MOST:,} tensors: make it smaller")
