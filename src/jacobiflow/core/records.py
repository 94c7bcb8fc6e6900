"""Dataclasses from plain data (JSON, TOML): unknown fields and wrong types are named."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from jacobiflow.core.types import JacobiflowError


class RecordError(JacobiflowError, ValueError):
    """Plain data that does not fit the dataclass it should become."""


T = TypeVar("T")


def build(kind: type[T], doc: Any, where: str) -> T:
    """A dataclass from a plain dict: unknown fields and wrong types are named."""
    assert is_dataclass(kind)
    if not isinstance(doc, dict):
        raise RecordError(f"{where} must be a table")
    hints = get_type_hints(kind)
    values = {}
    for name, value in doc.items():
        if name not in hints:
            raise RecordError(f"{where} has no field {name!r}; it has {', '.join(hints)}")
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
        return float(value)
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
    raise RecordError(f"{where} must be {_describe(hint)}, not {value!r}")


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    return getattr(hint, "__name__", str(hint)) if not get_args(hint) else str(hint)
