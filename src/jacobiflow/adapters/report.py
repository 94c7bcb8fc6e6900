"""`acceleration`: what was accelerated, what was not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.distributions import Transform

from jacobiflow.adapters import made, own_made, pyro, zuko
from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.race import ORIGINAL
from jacobiflow.adapters.walk import Found, walk
from jacobiflow.core.tables import shortened, table

KINDS: tuple[type[Patch], ...] = (
    *(made.Inverse, zuko.ForwardPatch, zuko.Inverse, zuko.OpenInverse),
    *(pyro.Inverse, pyro.Condition, own_made.Inverse),
)
COLUMNS = ("transform", "runs now", "why not faster", "calls", "rows", "passes saved")
LONGEST_NAME = 28  # characters of a path or a class that are shown
DRAWS = "it is a distribution that is sampled feature by feature, not a transform: it has no inverse to solve"
UNKNOWN = "its structure is not known: jf.OwnMADE takes any masked network"
NOT_YET = "not accelerated: call jf.accelerate"


@dataclass(frozen=True)
class Entry:
    """One autoregressive transform."""

    path: str  # from the object that was searched; "" is the object itself
    kind: str  # name of its class
    runs: str  # "C kernels", "cached steps", "cached sweeps", "full sweeps" or "original"
    why: str  # why nothing faster runs; "" if there is nothing faster
    calls: dict[str, int] = field(default_factory=dict)  # how often each of them ran
    rows: int = 0  # that were solved
    passes_saved: int = 0  # passes of the original's network

    def cells(self) -> tuple[str, ...]:
        """The texts of its row in the table."""
        calls = ", ".join(f"{count:,} {name}" for name, count in self.calls.items())
        names = (shortened(name, LONGEST_NAME) for name in (self.path or "(itself)", self.kind))
        return " ".join(names), self.runs, self.why, calls or "none", f"{self.rows:,}", f"{self.passes_saved:,}"


@dataclass(frozen=True, repr=False)
class Acceleration:
    """Every autoregressive transform in an object. Prints as a table, in notebooks too."""

    name: str
    entries: tuple[Entry, ...]

    def __repr__(self) -> str:
        if not self.entries:
            return f"{self.name}: no autoregressive transform"
        rows = [COLUMNS, *(entry.cells() for entry in self.entries)]
        why = COLUMNS.index("why not faster")
        return table(rows if any(e.why for e in self.entries) else [[*r[:why], *r[why + 1 :]] for r in rows])


def acceleration(model: Any) -> Acceleration:
    """What runs in every autoregressive transform of `model`, how often, and why nothing faster does.

    >>> from torch import nn
    >>> print(acceleration(nn.Linear(2, 2)))
    Linear: no autoregressive transform
    """
    found = list(searched(model))
    entries = list[Entry]()
    for at, patch in known(found):
        (runs, why), ran = patch.now(), patch.tally
        if vars(at.item).get(patch.method) is not patch:
            runs, why = ORIGINAL, why if runs == ORIGINAL else NOT_YET
        tally = dict(ran.calls), ran.rows, round(ran.passes_saved)
        entries.append(Entry(at.path, type(at.item).__name__, runs, why, *tally))
    entries += [Entry(at.path, type(at.item).__name__, ORIGINAL, why) for at, why in unknown(found)]
    return Acceleration(type(model).__name__, tuple(entries))


def searched(model: Any) -> Iterator[Found]:
    """Every module and transform that can be reached from `model`."""
    kinds = (nn.Module, Transform)
    return (at for at in walk(model, skip=(Patch,)) if issubclass(type(at.item), kinds))


def known(found: list[Found]) -> Iterator[tuple[Found, Patch]]:
    """The patches that are installed or may apply, by structure."""
    for at, kind in product(found, KINDS):
        if kind.matches(at.item):
            installed = vars(at.item).get(kind.method)
            yield at, installed if isinstance(installed, Patch) else kind(at.item)


def unknown(found: list[Found]) -> Iterator[tuple[Found, str]]:
    """What else holds masked layers, and why it is not accelerated."""
    covered = {id(m) for _, patch in known(found) for m in (patch.owner, *patch.module.modules())}
    named = set[int]()
    for layer in found:
        if id(layer.item) in covered or not _is_masked(layer.item):
            continue
        owner = _owner(layer)
        if id(owner.item) not in named:
            named.add(id(owner.item))
            draws = hasattr(type(owner.item), "sample") and not hasattr(type(owner.item), "inverse")
            yield owner, DRAWS if draws else UNKNOWN


def _owner(layer: Found) -> Found:
    """The nearest module around a layer that can be sampled or inverted; else what holds the layer."""
    at, methods = layer.holder, ("inverse", "_inverse", "sample")
    while at and not (isinstance(at.item, nn.Module) and any(hasattr(type(at.item), name) for name in methods)):
        at = at.holder
    return at or layer.holder or layer


def _is_masked(item: Any) -> bool:
    """Whether a layer has a mask of the shape of a weight, its own or that of a part."""
    if not isinstance(item, nn.Module):
        return False
    mask = vars(item).get("mask", item._buffers.get("mask"))
    weights = (p for m in (item, *item.children()) for p in m._parameters.values() if p is not None)
    return isinstance(mask, Tensor) and mask.ndim == 2 and any(p.shape == mask.shape for p in weights)
