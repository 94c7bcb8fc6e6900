"""`accelerate`: fast sampling from other libraries' autoregressive flows, in one line.

Only the given objects are patched: each transform gets an instance attribute that replaces one method. The
attribute is pickled, copied and moved with its owner; `restore` removes it.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.distributions import Distribution, Transform

from jacobiflow.adapters import made, pyro, zuko
from jacobiflow.adapters.patch import Patch
from jacobiflow.adapters.transform_spec import Declined
from jacobiflow.core.results import JacobiflowError

Model = TypeVar("Model")
KINDS: tuple[type[Patch], ...] = (made.Inverse, zuko.ForwardPatch, zuko.Inverse, pyro.Inverse, pyro.Condition)
SEARCHED = ("sbi",)  # packages whose objects are all searched for transforms


class AccelerationError(JacobiflowError, TypeError):
    """There is nothing to accelerate."""


def accelerate(model: Model, tol: float = 1e-6) -> Model:
    """Speed up the slow direction of every autoregressive transform in `model`; returns the same object.

    model: a module of nflows, zuko, normflows, Pyro or of a copy of them, an sbi posterior or estimator, or a
        torch distribution made of them.
    tol: largest relative change of a sample in its last sweep, in units of max(|x|, |z dx/dz|). It holds for
        float32; float64 is solved to its square, samples with gradients to a hundredth of it. It is never
        tighter than what the dtype, or the transform's own inner solver, can resolve.

    Results stay those of the library, up to tol. The original runs where it is faster. Samples have first
    derivatives with respect to noise, weights and context, by the implicit function theorem. Samples without
    a finite inverse are NaN. A transform that computes something else than it seems to is not accelerated: a
    warning says why.
    """
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be in [0, 1), not {tol}")
    looked, declined, accepted = Counter[str](), Counter[str](), 0
    for item in _walk(model):
        looked[type(item).__name__] += 1
        for patch in _patches(item, tol):
            try:
                min_rows = patch.inverter().min_rows
            except Declined as reason:
                declined[f"{type(item).__name__}: {reason}"] += 1
                continue
            accepted += 1
            installed = vars(item).get(patch.method)
            if isinstance(installed, Patch):
                installed.tol = tol
            elif min_rows < math.inf:  # else the original cannot be beaten
                patch.install()
    reasons = "".join(f"; {count} {reason}" for reason, count in declined.items())
    if not accepted:
        kinds = ", ".join(f"{count} {name}" for name, count in looked.items())
        raise AccelerationError(
            f"nothing to accelerate in {type(model).__name__}: no masked autoregressive transform of a known "
            f"structure among {kinds or 'its parts'}{reasons}"
        )
    if declined:
        warnings.warn(f"part of {type(model).__name__} is not accelerated{reasons}", stacklevel=2)
    return model


def restore(model: Model) -> Model:
    """Remove the acceleration; returns the same object."""
    for patch in _installed(model):
        patch.remove()
    return model


@contextmanager
def accelerated(model: Model, tol: float = 1e-6) -> Iterator[Model]:
    """`accelerate` inside a with statement; what was accelerated before stays accelerated."""
    before = {id(patch): (patch, patch.tol) for patch in _installed(model)}
    try:
        yield accelerate(model, tol)
    finally:
        for patch in _installed(model):
            if id(patch) in before:
                patch.tol = before[id(patch)][1]
            else:
                patch.remove()


def _patches(item: Any, tol: float) -> Iterator[Patch]:
    """The patches that may apply to `item`, by its structure."""
    return (kind(item, tol) for kind in KINDS if kind.matches(item))


def _installed(model: Any) -> list[Patch]:
    return [v for item in _walk(model) for v in list(vars(item).values()) if isinstance(v, Patch)]


def _walk(root: Any) -> Iterator[Any]:
    """Every module, distribution, transform and sbi object that can be reached from `root`, once."""
    seen, todo = set[int](), [root]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, dict):
            todo += list(item.values())[::-1]
        elif isinstance(item, list | tuple):
            todo += item[::-1]
        elif isinstance(item, functools.partial):
            todo += [item.keywords, item.args, item.func]
        elif hasattr(item, "__self__") and callable(item):
            todo.append(item.__self__)
        elif hasattr(item, "__dict__") and (
            isinstance(item, nn.Module | Distribution | Transform)
            or type(item).__module__.partition(".")[0] in SEARCHED
        ):
            yield item
            todo.append(vars(item))
