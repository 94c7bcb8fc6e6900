"""`accelerate`: fast sampling from other libraries' autoregressive flows, in one line; and its report."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import product
from os import PathLike
from reprlib import repr as short
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributions import Transform

from jacobiflow.adapters import made, own_made, pyro, zuko
from jacobiflow.adapters.patch import ORIGINAL, Patch
from jacobiflow.adapters.transform_spec import Declined, NothingToGain
from jacobiflow.adapters.walk import Found, attributes, walk
from jacobiflow.core.arguments import number
from jacobiflow.core.results import JacobiflowError
from jacobiflow.core.tables import shortened, table
from jacobiflow.flows.flow import Flow

Model = TypeVar("Model")
COUPLING = re.compile("coupl|^MaskedAffineFlow$", re.IGNORECASE)  # names of layers, in any library
KINDS: tuple[type[Patch], ...] = (
    *(made.Inverse, zuko.ForwardPatch, zuko.Inverse, zuko.OpenInverse),
    *(pyro.Inverse, pyro.Condition, own_made.Inverse),
)
COLUMNS = ("transform", "runs now", "why not faster", "calls", "rows", "passes saved")
DRAWS = "it is a distribution that is sampled feature by feature, not a transform: it has no inverse to solve"
UNKNOWN = "its structure is not known: jf.OwnMADE takes any masked network"


class AccelerationError(JacobiflowError, TypeError):
    """There is nothing to accelerate."""


def accelerate(model: Model, tol: float = 1e-6) -> Model:
    """Speed up the slow direction of every autoregressive transform in `model`; returns the same object.

    model: any object that holds transforms of nflows, zuko, normflows, Pyro, of a copy of them, or your own
        (`OwnMADE`): a module, a distribution, an sbi posterior, a sampler. Attributes, containers and
        closures are searched.
    tol: largest relative change of a sample in its last sweep, in units of max(|x|, |z dx/dz|). It holds for
        float32; float64 is solved to its square, samples with gradients to a hundredth of it. It is never
        tighter than what the dtype, or the transform's own inner solver, can resolve.

    Results stay those of the library, up to tol. The original runs where it is faster. Samples have first derivatives
    with respect to noise, weights and context, by the implicit function theorem. Samples without a finite inverse are
    NaN. What is not accelerated is named in a warning; `acceleration(model)` has the details.
    """
    if not 0 <= number("tol", tol) < 1:
        raise ValueError(f"tol must be in [0, 1), not {tol}")
    found, accepted = list(searched(model)), 0
    declined = Counter(f"{type(at.item).__name__}: {why}" for at, why in unknown(found))
    for at, patch in known(found):
        try:
            with suppress(NothingToGain):
                patch.spec()
                patch.tol = tol
                patch.install()
            accepted += 1
        except Declined as reason:
            declined[f"{type(at.item).__name__}: {reason}"] += 1
    reasons = "".join(f"; {count} {reason}" for reason, count in declined.items())
    if not accepted:
        raise AccelerationError(f"nothing to accelerate in {type(model).__name__}: {_why(model, found)}{reasons}")
    if declined:
        warnings.warn(f"part of {type(model).__name__} is not accelerated{reasons}", stacklevel=2)
    return model


def _why(model: Any, found: list[Found]) -> str:
    if isinstance(model, str | PathLike | type):
        return f"give an object that holds a flow, not {short(model)}"
    if any(isinstance(at.item, Flow) for at in found):
        return "flows of jacobiflow are fast by themselves: call their sample or decode"
    kinds = Counter(type(at.item).__name__ for at in found)
    coupling = ", ".join(f"{count} {name}" for name, count in kinds.items() if COUPLING.search(name))
    if coupling:
        return f"coupling layers sample in one pass already ({coupling}): use the flow as it is"
    parts = ", ".join(f"{count} {name}" for name, count in kinds.items()) or "its parts"
    nothing = f"no masked autoregressive transform of a known structure among {parts}"
    every = () if found else walk(model)
    empty = [f"{at.path}.{name}" for at in every for name, value in attributes(at.item).items() if value is None]
    names = ", ".join(path.removeprefix(".") for path in empty[:5])
    return f"{nothing}; {names} are None: accelerate again when the flow is there" if empty else nothing


def restore(model: Model) -> Model:
    """Remove the acceleration; returns the same object."""
    for patch in _installed(model):
        patch.remove()
    return model


@contextmanager
def accelerated(model: Model, tol: float = 1e-6) -> Iterator[Model]:
    """`accelerate` inside a with statement; what was accelerated before stays accelerated."""
    before = {patch: patch.tol for patch in _installed(model)}
    try:
        yield accelerate(model, tol)
    finally:
        for patch in _installed(model):
            patch.tol = before.get(patch, patch.tol)
            if patch not in before:
                patch.remove()


def _installed(model: Any) -> list[Patch]:
    return [v for at in searched(model) for v in list(vars(at.item).values()) if isinstance(v, Patch)]


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


@dataclass(frozen=True, repr=False)
class Acceleration:
    """Every autoregressive transform in an object. Prints as a table, in notebooks too."""

    name: str
    entries: tuple[Entry, ...]

    def __repr__(self) -> str:
        if not self.entries:
            return f"{self.name}: no autoregressive transform"
        rows: list[tuple[str, ...]] = [COLUMNS]
        for e in self.entries:
            names = (shortened(name, 28) for name in (e.path or "(itself)", e.kind))
            calls = ", ".join(f"{count:,} {name}" for name, count in e.calls.items()) or "none"
            rows.append((" ".join(names), e.runs, e.why, calls, f"{e.rows:,}", f"{e.passes_saved:,}"))
        return table(rows if any(e.why for e in self.entries) else [(*r[:2], *r[3:]) for r in rows])


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
            runs, why = ORIGINAL, why if runs == ORIGINAL else "not accelerated: call jf.accelerate"
        counts = dict(ran.calls), ran.rows, round(ran.passes_saved)
        entries.append(Entry(at.path, type(at.item).__name__, runs, why, *counts))
    entries += [Entry(at.path, type(at.item).__name__, ORIGINAL, why) for at, why in unknown(found)]
    return Acceleration(type(model).__name__, tuple(entries))


def searched(model: Any) -> Iterator[Found]:
    """Every module and transform that can be reached from `model`."""
    return (at for at in walk(model, skip=(Patch,)) if issubclass(type(at.item), nn.Module | Transform))


def known(found: list[Found]) -> Iterator[tuple[Found, Patch]]:
    """The patches that are installed or may apply, by structure."""
    for at, kind in product(found, KINDS):
        if kind.matches(at.item):
            installed = vars(at.item).get(kind.method)
            yield at, installed if isinstance(installed, Patch) else kind(at.item)


def unknown(found: list[Found]) -> Iterator[tuple[Found, str]]:
    """What else holds masked layers, and why it is not accelerated."""
    covered = {id(m) for _, patch in known(found) for m in (patch.owner, *patch.module.modules())}
    owners = [_owner(at) for at in found if id(at.item) not in covered and _is_masked(at.item)]
    for owner in {id(at.item): at for at in owners}.values():
        draws = hasattr(type(owner.item), "sample") and not hasattr(type(owner.item), "inverse")
        yield owner, DRAWS if draws else UNKNOWN


def _owner(layer: Found) -> Found:
    """The nearest module around a layer that can be sampled or inverted; else what holds the layer."""
    at, methods = layer.holder, {"inverse", "_inverse", "sample"}
    while at and not (isinstance(at.item, nn.Module) and methods & set(dir(type(at.item)))):
        at = at.holder
    return at or layer.holder or layer


def _is_masked(item: Any) -> bool:
    """Whether a layer has a mask of the shape of a weight, its own or that of a part."""
    if not isinstance(item, nn.Module):
        return False
    mask = vars(item).get("mask", item._buffers.get("mask"))
    weights = (p for m in (item, *item.children()) for p in m._parameters.values() if p is not None)
    return isinstance(mask, Tensor) and mask.ndim == 2 and any(p.shape == mask.shape for p in weights)
