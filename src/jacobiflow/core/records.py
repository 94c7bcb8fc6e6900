"""Dataclasses from plain data (JSON, TOML): errors name unknown fields and wrong types."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from reprlib import repr as short
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from jacobiflow.core.results import JacobiflowError

T = TypeVar("T")


class RecordError(JacobiflowError, ValueError):
    """Plain data that does not fit its dataclass."""


def parse_json(text: str) -> Any:
    """Plain data from standard JSON: NaN, Infinity and repeated keys are errors."""
    try:
        return json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_unique_keys)
    except RecursionError:
        raise RecordError("it is nested too deeply") from None
    except ValueError as error:
        raise RecordError(f"it is not JSON: {error}") from None


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    doc = dict[str, Any]()
    for key, value in pairs:
        if key in doc:
            raise ValueError(f"the key {short(key)} is there twice")
        doc[key] = value
    return doc


def as_json(value: Any) -> Any:
    """Plain data that JSON can hold: non-finite numbers become None, tuples lists; tensors are dropped.

    >>> as_json({"a": (1.0, float("inf")), 2: "b"})
    {'a': [1.0, None], '2': 'b'}
    """
    if isinstance(value, dict):
        return {str(k): as_json(v) for k, v in value.items() if not isinstance(v, Tensor)}
    if isinstance(value, list | tuple):
        return [as_json(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def build(kind: type[T], doc: Any, where: str) -> T:
    """The dataclass `kind` from a dict; fields may be dataclasses too. `where` names it in errors."""
    assert is_dataclass(kind)
    if not isinstance(doc, dict):
        raise RecordError(f"{where} must be a table, not {short(doc)}")
    hints = get_type_hints(kind)
    values = {}
    for name, value in doc.items():
        if name not in hints:
            raise RecordError(f"{where} has no field {short(name)}; it has {', '.join(hints)}")
        values[name] = _fit(value, hints[name], f"{where}.{name}")
    for field in fields(kind):
        if field.name not in values and field.default is field.default_factory is MISSING:
            raise RecordError(f"{where} needs a field {field.name!r}")
    try:
        return kind(**values)
    except ValueError as error:
        raise RecordError(str(error)) from None


def _fit(value: Any, hint: Any, where: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if is_dataclass(hint):
        return build(hint, value, where)  # type: ignore[arg-type]
    if origin in (Union, UnionType):
        for option in args:
            with suppress(RecordError):
                return _fit(value, option, where)
    if origin is tuple and isinstance(value, list | tuple):
        inner = args[:1] * len(value) if args[-1] is ... else args
        if len(inner) == len(value):
            return tuple(_fit(value[i], inner[i], f"{where}[{i}]") for i in range(len(value)))
    if hint is float and type(value) is int:
        with suppress(OverflowError):
            return float(value)
    if type(value) in (hint, origin) or (origin is Literal and value in args):
        return value
    raise RecordError(f"{where} must be {_describe(hint)}, not {short(value)}")


def _describe(hint: Any) -> str:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (tuple, dict):
        return "a table" if origin is dict else f"a list of {_describe(args[0])}"
    if args:
        return " or ".join(map(repr if origin is Literal else _describe, args))
    return getattr(hint, "__name__", str(hint))
