"""Dataclasses from plain data (JSON, TOML): unknown fields and wrong types are named."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from dataclasses import is_dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from torch import Tensor

from jacobiflow.core.types import JacobiflowError


class RecordError(JacobiflowError, ValueError):
    """Plain data that does not fit the dataclass it should become."""


T = TypeVar("T")
LARGEST = 16 * 2**20  # bytes of a config, a plan, a recipe
NO_FILE = f"it is not a plain file of at most {LARGEST // 2**20} MiB"


def read_text(path: Path) -> str:
    """The text of a small plain file; nothing that never ends, or that fills the memory, is begun."""
    if check_plain(path) > LARGEST:
        raise RecordError(NO_FILE)
    return path.read_text(encoding="utf-8")


def check_plain(path: Path, words: str = NO_FILE) -> int:
    """The size of a plain file; whoever opens a pipe or a device instead may wait for ever."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise RecordError(words)
    return found.st_size


def parse_json(text: str) -> Any:
    """Plain data from JSON as the standard has it: no NaN, no Infinity, no key twice.

    >>> parse_json('{"tol": 0.5, "tol": 0.1}')
    Traceback (most recent call last):
    jacobiflow.core.records.RecordError: the key 'tol' is there twice
    """
    try:
        return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_once)
    except RecordError:
        raise
    except RecursionError:
        raise RecordError("it is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"it is not JSON: {error}") from None


def as_json(value: Any) -> Any:
    """Plain data as JSON has it: numbers that are not finite become None, tuples lists; no tensors.

    >>> as_json({"a": (1.0, float("inf")), 2: "b"})
    {'a': [1.0, None], '2': 'b'}
    """
    if isinstance(value, dict):
        return {str(k): as_json(v) for k, v in value.items() if not isinstance(v, Tensor)}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _no_constant(name: str) -> Any:
    raise RecordError(f"{name} is no JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RecordError(f"the key {short(key)} is there twice")
        found[key] = value
    return found


def build(kind: type[T], doc: Any, where: str) -> T:
    """A dataclass from a plain dict: unknown fields and wrong types are named."""
    assert is_dataclass(kind)
    if not isinstance(doc, dict):
        raise RecordError(f"{where} must be a table")
    hints = get_type_hints(kind)
    values = {}
    for name, value in doc.items():
        if name not in hints:
            raise RecordError(f"{where} has no field {short(name)}; it has {', '.join(hints)}")
        values[name] = _fit(value, hints[name], f"{where}.{name}")
    try:
        return kind(**values)
    except TypeError as error:
        raise RecordError(f"{where}: {str(error).partition(' ')[2]}") from None
    except ValueError as error:
        raise RecordError(str(error)) from None


def _fit(value: Any, hint: Any, where: str) -> Any:
    """`value` as the type `hint`, or a RecordError."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal and value in args:
        return value
    if origin is tuple and isinstance(value, list | tuple):
        inner = args[:1] * len(value) if args[-1] is ... else args
        if len(inner) == len(value):
            return tuple(
                _fit(v, h, f"{where}[{i}]") for i, (v, h) in enumerate(zip(value, inner, strict=True))
            )
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise RecordError(f"{where} is too large: {short(value)}") from None
    if hint in (int, bool, str) and type(value) is hint:
        return value
    if origin is not Literal and origin is not tuple and args:  # a union
        for option in args:
            if option is type(None) and value is None:
                return None
            try:
                return _fit(value, option, where)
            except RecordError:
                continue
    raise RecordError(f"{where} must be {_describe(hint)}, not {short(value)}")


def _describe(hint: Any) -> str:
    """A type as a user would say it."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple:
        return f"a list of {_describe(args[0])}"
    return " or ".join(map(_describe, args)) if args else getattr(hint, "__name__", str(hint))
