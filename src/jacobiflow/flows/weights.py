"""Weights as data: their shapes, whether they fit into memory, and whether they have changed."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from jacobiflow.core.hardware import SizeError, require_memory
from jacobiflow.kernels.checksum import Memory, Running, Sums, layout

MOST = 100_000  # tensors of a model
T = TypeVar("T")
R = TypeVar("R")
Group = tuple["WeightMemo | None", Iterable[Tensor]]  # tensors, and another memo of the same ones


@dataclass(frozen=True)
class Seen:
    """A result, and the state of its tensors at that time."""

    places: list[Any]
    versions: list[int | None]
    memory: Memory
    sums: list[Sums]  # of each group
    made: Any


_trusted: ContextVar[Mapping[WeightMemo, list[Sums]]] = ContextVar("_trusted")  # checksums, until they are verified


class WeightMemo:
    """Keeps a result derived from tensors until a byte of them changes.

    A checksum decides: versions and addresses do not show writes through `.data`, numpy or shared memory.
    """

    def __init__(self) -> None:
        self._seen: Seen | None = None
        self._lock = threading.Lock()

    def fresh(self, tensors: Iterable[Tensor], make: Callable[[], T]) -> T:
        """The result of `make`, which reads these tensors; called again only after they change."""
        return self.look(((None, tensors),), make).made  # type: ignore[no-any-return]

    def solve(self, groups: Iterable[Group], make: Callable[[], T], use: Callable[[T], R]) -> R:
        """use(made) with the result of `make`, which reads the tensors of all groups.

        Large tensors are read while `use` runs on the previous result. If they have changed, `make` and `use`
        run again. During `use` the memos named with the groups do not read their tensors.
        """
        groups = [(watch, list(tensors)) for watch, tensors in groups]
        seen = self._seen
        if seen is not None and seen.memory.apart and (seen.places, seen.versions) == _state(groups):
            with Running(seen.memory, threads=1) as sums:
                try:
                    found = self._using(groups, seen, use)
                except Exception:  # it means nothing if the weights have changed
                    if sums.end() == seen.sums:
                        raise
                else:
                    if sums.end() == seen.sums:
                        return found
        return self._using(groups, self.look(groups, make), use)

    def _using(self, groups: Sequence[Group], seen: Seen, use: Callable[[Any], R]) -> R:
        own = {watch: [sums] for (watch, _), sums in zip(groups, seen.sums, strict=True) if watch is not None}
        before = _trusted.set(own | {self: seen.sums})
        try:
            return use(seen.made)
        finally:
            _trusted.reset(before)

    def look(self, groups: Iterable[Group], make: Callable[[], Any]) -> Seen:
        """The result of `fresh` for the tensors of all groups, with their state."""
        with self._lock, torch.no_grad():
            seen = self._seen
            if seen is not None and _trusted.get({}).get(self) == seen.sums:
                return seen
            found = [(watch, list(tensors)) for watch, tensors in groups]
            places, versions = _state(found)
            known = seen if seen is not None and seen.places == places else None
            memory = Memory(tensors for _, tensors in found) if known is None else known.memory
            sums = memory.sums()
            if known is not None and known.sums == sums:
                self._seen = replace(known, versions=versions)
                return self._seen
            self._seen = None  # should `make` fail, the next look calls it again
            now = Seen(places, versions, memory, sums, make())
            if memory.sums() == sums:  # else they were written to meanwhile, before or after it read them
                self._seen = now
            return now

    def __reduce__(self) -> Any:
        return WeightMemo, ()  # a copy starts empty


class MemoModule(nn.Module):
    """A module that keeps what is made of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.memo = WeightMemo()

    def reuse(self, make: Callable[[], T]) -> T:
        """The result of `make`, which reads the tensors; made again only when one of them has changed."""
        return self.memo.fresh(tensors_of(self), make)


def _state(groups: Iterable[Group]) -> tuple[list[Any], list[int | None]]:
    """The place of each tensor, and its version: most writes change it, equal versions prove nothing."""
    every = [t for _, tensors in groups for t in tensors]
    places = [(id(t), t.data_ptr(), *layout(t)) for t in every]  # memory that is kept alive is not reused
    return places, [None if t.is_inference() else t._version for t in every]


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """All parameters and buffers."""
    modules = [module]
    while modules:  # `Module.parameters` takes twice as long
        m = modules.pop()
        yield from (t for t in (*m._parameters.values(), *m._buffers.values()) if t is not None)
        modules += (child for child in m._modules.values() if child is not None)


def digest(tensors: Mapping[str, Tensor], *more: str) -> str:
    """A hash of names and numbers that is equal in every process; `more` is hashed with them."""
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
    require_memory("a model of this config", size, "make it smaller")
    if len(found) > MOST:
        raise SizeError(f"a model of this config has more than {MOST:,} tensors: make it smaller")
