"""Every object that can be reached from another: attributes, containers, closures."""

from __future__ import annotations

import functools
import types
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn

MOST = 100_000  # objects that are looked at
OPAQUE = (Tensor, type, types.ModuleType, str, bytes, int, float, complex, type(None))


class Found(NamedTuple):
    """An object, its path from the root, and what holds it."""

    path: str
    item: Any
    holder: Found | None


def walk(root: Any, skip: tuple[type, ...] = ()) -> Iterator[Found]:
    """Every object that can be reached from `root`, once, the nearest first, except those of the types in `skip`.

    Only stored values are read: no property runs, nothing is imported. Beyond MOST objects a warning says so.
    """
    opaque = (*OPAQUE, *skip)
    seen, todo = {id(root): root}, deque([Found("", root, None)])  # objects that are kept keep their id
    while todo:
        found = todo.popleft()
        yield found
        for step, part in _parts(found.item):
            if issubclass(type(part), opaque) or id(part) in seen:
                continue
            if len(seen) == MOST:
                what = f"{type(root).__name__} holds more than {MOST:,} objects, the others were not searched"
                warnings.warn(f"{what}: pass the attribute that holds the flow", stacklevel=3)
                yield from todo
                return
            seen[id(part)] = part
            todo.append(Found(found.path + step, part, found))


def captured(function: Any) -> list[nn.Module]:
    """The modules that a function holds or names as globals, without their parts."""
    inner, modules = set[int](), list[nn.Module]()
    names, known = _names(getattr(function, "__code__", None)), getattr(function, "__globals__", {})
    for found in walk([function, *(known[name] for name in names if name in known)]):
        if issubclass(type(found.item), nn.Module) and id(found.item) not in inner:
            modules.append(found.item)
            inner |= {id(m) for m in found.item.modules()}
    return modules


def _names(code: Any) -> list[str]:
    """The globals and attributes that a function and those inside it name; none of anything else."""
    if type(code) is not types.CodeType:
        return []
    return [*code.co_names, *chain.from_iterable(map(_names, code.co_consts))]


def _parts(item: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and how to get there."""
    kind = type(item)
    if issubclass(kind, dict):
        yield from ((f"[{key!r}]" if type(key) in (str, int) else "[...]", v) for key, v in dict.items(item))
    elif base := next((t for t in (list, tuple, set, frozenset, deque) if issubclass(kind, t)), None):
        yield from ((f"[{i}]", part) for i, part in enumerate(base.__iter__(item)))
    elif issubclass(kind, functools.partial):
        yield from ((".func", item.func), (".args", item.args), (".keywords", item.keywords))
    elif kind in (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType):
        yield ".__self__", item.__self__
    elif kind is types.FunctionType:
        for name, cell in zip(item.__code__.co_freevars, item.__closure__ or (), strict=True):
            with suppress(ValueError):  # it is empty
                yield f"<{name}>", cell.cell_contents
        defaults = chain(enumerate(item.__defaults__ or ()), (item.__kwdefaults__ or {}).items())
        yield from ((f"<default {key}>", value) for key, value in defaults)
    yield from ((f".{name}", value) for name, value in attributes(item).items())


def attributes(item: Any) -> dict[str, Any]:
    """The attributes that an object stores, submodules by their names."""
    kind, slots = type(item), dict[str, Any]()
    for name, member in chain.from_iterable(vars(c).items() for c in kind.__mro__ if "__slots__" in vars(c)):
        if type(member) is types.MemberDescriptorType and name not in slots:
            with suppress(AttributeError):  # it is not set
                slots[name] = member.__get__(item)
    stored = kind.__dictoffset__ and kind is not types.FunctionType
    own = object.__getattribute__(item, "__dict__") if stored else {}
    modules = dict(own.get("_modules") or {}) if issubclass(kind, nn.Module) else {}
    return slots | {name: value for name, value in own.items() if name != "_modules" or not modules} | modules
