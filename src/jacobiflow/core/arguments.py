"""What callers hand in, checked: it comes back as it is used, or an error says what is wrong."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from os import PathLike
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import torch
from torch import Tensor

Labels = int | Sequence[int] | np.ndarray[Any, np.dtype[np.integer[Any]]] | Tensor  # one for all samples, or one each


def as_int(name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """A whole number from `least` to `most`, of Python or numpy or a tensor's; True is none."""
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool):
        raise ValueError(f"{name} must be a whole number, not {short(value)}")
    if found < least:
        raise ValueError(f"{name} must be {least} or more, not {short(found)}")
    if most is not None and found > most:
        raise ValueError(f"{name} must be {most:,} or less, not {short(found)}")
    return found


def set_ints(record: Any, kind: str, **least: int) -> None:
    """Make fields of a frozen dataclass whole numbers of at least these values; `kind` is its name in errors."""
    for name, bound in least.items():
        object.__setattr__(record, name, as_int(f"{kind}.{name}", getattr(record, name), bound))


def set_fields(record: Any, kind: str, check: Callable[[str, Any], Any], *names: str) -> None:
    """Make fields of a frozen dataclass what `check` makes of them, such as `number`."""
    for name in names:
        object.__setattr__(record, name, check(f"{kind}.{name}", getattr(record, name)))


def number(name: str, value: Any) -> float:
    """A number that is finite, of Python or numpy or a tensor's."""
    real = isinstance(value, Real) or (isinstance(value, Tensor) and value.ndim == 0 and not value.is_complex())
    try:
        found = float(value) if real and not isinstance(value, bool) else math.nan
    except OverflowError:
        found = math.inf
    if not math.isfinite(found):
        raise ValueError(f"{name} must be finite, not {short(value)}")
    return found


def switch(name: str, value: Any) -> bool:
    """True or False, of Python or numpy: a word such as "no" would count as True."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, not {short(value)}")
    return bool(value)


def word(name: str, value: Any, known: Iterable[str]) -> None:
    """Refuse what is not one of these words."""
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, not {short(value)}")


def function(name: str, value: Any) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, not {short(value)}")


def as_path(name: str, value: Any) -> Path:
    """A path, of Python or as text."""
    if not isinstance(value, str | PathLike):
        raise TypeError(f"{name} must be a path, not {short(value)}")
    return Path(value)


def instance(kind: type[Any], value: Any, taker: str = "this flow") -> None:
    """Refuse what is of another type."""
    if not isinstance(value, kind):
        raise ValueError(f"{taker} takes a {kind.__name__}, not {type(value).__name__}")


def tensor(name: str, value: Any, like: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse what is no plain tensor [N, *shape] of the flow's floats on its device: nothing is cast silently."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch tensor, not {type(value).__name__}: use torch.as_tensor({name})")
    if value.layout is not torch.strided or not value.is_floating_point():
        kind = str(value.dtype if value.layout is torch.strided else value.layout).removeprefix("torch.")
        raise ValueError(f"{name} must be a dense tensor of floats, not {kind}")
    if value.device != like.device:
        raise ValueError(f"{name} is on {value.device}, the flow on {like.device}: bring them together")
    if tuple(value.shape[1:]) != shape:
        raise ValueError(f"{name} must be [N, {', '.join(map(str, shape))}], not {list(value.shape)}")
    if value.dtype != like.dtype and not torch.is_autocast_enabled(value.device.type):
        mine, its = (str(t).removeprefix("torch.") for t in (like.dtype, value.dtype))
        raise ValueError(f"{name} is {its}, the flow {mine}: use {name}.to(torch.{mine}) or flow.to({name}.dtype)")


def labels(value: Labels, n: int | None, classes: int, device: torch.device) -> Tensor:
    """Class numbers [n], of one whole number or n of them; -1 is no label. n None: as many as there are."""
    if not classes:
        raise ValueError("this flow takes no labels: leave them out")
    words = "labels must be a whole number, or one per sample in a list, range, array or tensor"
    try:
        found = torch.as_tensor(value.copy() if isinstance(value, np.ndarray) else value, device=device)
    except (TypeError, ValueError, RuntimeError):  # which of them, differs between kinds of mistakes
        named = isinstance(value, str | list | tuple) and any(isinstance(v, str) for v in value)
        hint = ": flow.class_names.index gives the number of a name" if named else ""
        raise ValueError(f"{words}, not {short(value)}{hint}") from None
    whole = not (found.is_floating_point() or found.is_complex() or found.dtype is torch.bool)
    if found.ndim > 1 or not (whole or found.shape == (0,)):
        kind = str(found.dtype).removeprefix("torch.")
        raise ValueError(f"{words}, not {kind} of shape {list(found.shape)}")
    if found.ndim == 1 and n is not None and len(found) != n:
        raise ValueError(f"there are {len(found)} labels for {n} samples: give one, or as many as samples")
    found = found.long()
    if found.numel() and not torch.compiler.is_compiling():  # a look at values would break the graph
        for end in (int(found.min()), int(found.max())):
            if not -1 <= end < classes:
                raise ValueError(f"labels must be 0 .. {classes - 1}, or -1 for none, not {end}")
    return found if n is None else found.expand(n)
