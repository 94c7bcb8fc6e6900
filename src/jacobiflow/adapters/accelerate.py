"""`accelerate`: fast sampling from other libraries' autoregressive flows, in one line.

Only the given objects are patched: each transform gets an instance attribute that replaces one method. The
attribute is pickled, copied and moved with its owner; `restore` removes it.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike
from reprlib import repr as short
from typing import Any, TypeVar

from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.report import known, searched, unknown
from jacobiflow.adapters.transform_spec import Declined, NothingToGain
from jacobiflow.adapters.walk import Found, attributes, walk
from jacobiflow.core.arguments import number
from jacobiflow.core.results import JacobiflowError
from jacobiflow.flows.flow import Flow

Model = TypeVar("Model")
COUPLING = re.compile("coupl|^MaskedAffineFlow$", re.IGNORECASE)  # names of layers, in any library
NAMED = 5  # empty attributes that an error names


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
        why = _why_nothing(model, found)
        raise AccelerationError(f"nothing to accelerate in {type(model).__name__}: {why}{reasons}")
    if declined:
        warnings.warn(f"part of {type(model).__name__} is not accelerated{reasons}", stacklevel=2)
    return model


def _why_nothing(model: Any, found: list[Found]) -> str:
    """Why an object with these parts has no transform to accelerate, and what to do."""
    if isinstance(model, str | PathLike | type):
        return f"give an object that holds a flow, not {short(model)}"
    if any(isinstance(at.item, Flow) for at in found):
        return "flows of jacobiflow are fast by themselves: call their sample or decode"
    kinds = Counter(type(at.item).__name__ for at in found)
    coupling = ", ".join(f"{count} {name}" for name, count in kinds.items() if COUPLING.search(name))
    if coupling:
        return f"coupling layers sample in one pass already ({coupling}): use the flow as it is"
    parts = ", ".join(f"{count} {name}" for name, count in kinds.items()) or "its parts"
    return f"no masked autoregressive transform of a known structure among {parts}{'' if found else _later(model)}"


def _later(model: Any) -> str:
    """Which attributes may hold a flow once they are set."""
    empty = [at.path + "." + name for at in walk(model) for name, v in attributes(at.item).items() if v is None]
    names = ", ".join(path.removeprefix(".") for path in empty[:NAMED])
    return f"; {names} are None: accelerate again when the flow is there" if empty else ""


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
            if patch in before:
                patch.tol = before[patch]
            else:
                patch.remove()


def _installed(model: Any) -> list[Patch]:
    return [v for at in searched(model) for v in list(vars(at.item).values()) if isinstance(v, Patch)]
