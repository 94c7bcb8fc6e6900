"""`accelerate`: the slow direction of other libraries' autoregressive flows by sweeps, one line.

Nothing is patched but the objects that are given: each transform gets an instance attribute in place of
one method, which pickles, copies and moves with it, and which `restore` takes off.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.distributions import Distribution, Transform

from jacobiflow.adapters.foreign import Patch
from jacobiflow.core.types import JacobiflowError

Model = TypeVar("Model")
LIBRARIES = ("nflows", "zuko", "normflows", "pyro")
OPEN = ("sbi",)  # objects of these packages are looked into, whatever they are


class AccelerationError(JacobiflowError, TypeError):
    """There is nothing to accelerate."""


def accelerate(model: Model, tol: float = 1e-6) -> Model:
    """Make the slow direction of every autoregressive transform in `model` fast; the same object back.

    model: a module of nflows, zuko, normflows or Pyro, an sbi posterior or estimator, or a torch
        distribution made of them.
    tol: largest change of a sample in its last sweep, in units of max(|x|, |dx/dz|), in float32;
        float64 is solved to its square, and samples that carry gradients to a hundredth of it. It is
        never tighter than the dtype, or the transform's own inner solver, can hold.

    Results stay those of the library. Where sweeps would not pay the original runs. Samples are
    differentiable in noise, weights and context, once, by the implicit function theorem.
    """
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be in [0, 1), not {tol}")
    looked, found = Counter[str](), 0
    for item in _walk(model):
        looked[type(item).__name__] += 1
        for patch in _patches(item, tol):
            found += 1
            there = vars(item).get(patch.method)
            if isinstance(there, Patch):
                there.tol = tol
            elif patch.shared().least < math.inf:  # else nothing is put in place: the original is at its best
                patch.install()
    if not found:
        kinds = ", ".join(f"{count} {name}" for name, count in looked.items())
        raise AccelerationError(
            f"nothing to accelerate in {type(model).__name__}: no masked autoregressive transform of "
            f"{', '.join(LIBRARIES)} among {kinds or 'its parts'}"
        )
    return model


def restore(model: Model) -> Model:
    """Take the acceleration off; the same object back, as it was."""
    for patch in _installed(model):
        patch.remove()
    return model


@contextmanager
def accelerated(model: Model, tol: float = 1e-6) -> Iterator[Model]:
    """`accelerate` for the length of a with statement; what was accelerated before stays so."""
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
    """The patches that fit `item`; libraries that it does not come from are not imported."""
    roots = {kind.__module__.partition(".")[0] for kind in type(item).__mro__}
    for name in LIBRARIES:
        if name in roots:
            for kind in importlib.import_module(f"jacobiflow.adapters.{name}").PATCHES:
                if isinstance(item, kind.owners) and (patch := kind(item, tol)).describe() is not None:
                    yield patch


def _installed(model: Any) -> list[Patch]:
    return [v for item in _walk(model) for v in list(vars(item).values()) if isinstance(v, Patch)]


def _walk(root: Any) -> Iterator[Any]:
    """Every module, distribution, transform and sbi object that is reached from `root`, once."""
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
            or type(item).__module__.partition(".")[0] in OPEN
        ):
            yield item
            todo.append(vars(item))
