"""Method: how one block is solved. Plan: one Method per block; plain data that can be saved and read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import groupby
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal, get_args

from jacobiflow.core.arguments import as_int, number, set_fields, set_ints, word
from jacobiflow.core.files import read_text, write_text
from jacobiflow.core.records import RecordError, build
from jacobiflow.core.results import JacobiflowError, warn_once

Init = Literal["zeros", "noise", "previous", "calibrated"]
Unit = Literal["absolute", "relative"]
Precision = Literal["float32", "mixed"]
INITS: tuple[Init, ...] = get_args(Init)
FORMAT = "jacobiflow-plan"
VERSION = 2  # 1: windows were closed one after the other, and max_sweeps was per window
MOST = 10_000  # methods of a plan that is read; no flow has as many blocks


@dataclass(frozen=True, kw_only=True)
class Method:
    """How one block is solved: a window of `width` positions, swept until changes are at most `tol`.

    width: positions per window; None is the whole sequence, 1 is sequential decoding.
    tol: the largest change that counts as small; 0 asks for the exact answer. It bounds the residual, not the
        deviation from exact, which the block may amplify.
    max_sweeps: sweeps per sample; None is the bound after which every answer is exact.
    init: the first guess: "zeros", a fixed draw of standard normal "noise", "previous" (the block's input) or
        "calibrated" (a line fitted per position). None: "calibrated" where the flow has one, else "previous"
        for absolute and "zeros" for relative methods.
    unit: of changes: "absolute", or "relative" to max(|x|, |z dx/dz|), right for any scale. None: the family's.
    precision: "mixed" improves the first guess of whole-sequence sweeps by sweeps in bfloat16, where the
        processor and the backend have it. Sweeps in float32 follow, so tol and status mean the same.
    """

    width: int | None = None
    tol: float = 0.0
    max_sweeps: int | None = None
    init: Init | None = None
    unit: Unit | None = None
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        set_ints(self, "Method", **{name: 1 for name in ("width", "max_sweeps") if getattr(self, name) is not None})
        set_fields(self, "Method", number, "tol")
        if self.tol < 0:
            raise ValueError(f"Method.tol must be finite and not negative, not {self.tol}")
        for name, kind in (("init", Init), ("unit", Unit), ("precision", Precision)):
            if name == "precision" or getattr(self, name) is not None:
                word(f"Method.{name}", getattr(self, name), get_args(kind))
        if self.precision == "mixed" and self.width is not None:
            raise ValueError("Method.precision 'mixed' is for whole-sequence sweeps: leave out width")

    def resolved(self, unit: Unit = "absolute", *, calibrated: bool = False) -> Method:
        """The same method with every default spelled out. unit: the family's. calibrated: whether the flow is."""
        unit, init = self.unit or unit, self.init
        if init is None and self.width != 1:
            init = "calibrated" if calibrated else "previous" if unit == "absolute" else "zeros"
        return self if (init, unit) == (self.init, self.unit) else replace(self, init=init, unit=unit)

    def in_words(self) -> str:
        """The width; then tol and the other fields that differ from their defaults, except the unit."""
        if self.width == 1:
            return "sequential"
        words = ["sweeps" if self.width is None else f"window of {self.width}", f"tol {self.tol}"]
        for f in fields(self):
            if f.name not in ("width", "tol", "unit") and getattr(self, f.name) != f.default:
                words.append(f"{f.name} {getattr(self, f.name)}")
        return ", ".join(words)


class PlanError(JacobiflowError, ValueError):
    """A plan that cannot be read or does not fit the flow."""


@dataclass(frozen=True, repr=False)
class Plan:
    """How each block is solved, the block next to the noise first.

    `about` holds what was measured when the plan was made; it changes nothing.

    >>> Plan.selective(3, tol=0.5)
    Plan of 3 blocks, the one next to the noise first
      block 0: sequential
      blocks 1-2: sweeps, tol 0.5
    """

    methods: tuple[Method, ...]
    about: dict[str, Any] = field(default_factory=dict, compare=False, hash=False, kw_only=True)

    def __post_init__(self) -> None:
        methods = tuple(self.methods) if isinstance(self.methods, Iterable) else (self.methods,)
        if not all(isinstance(method, Method) for method in methods):
            raise PlanError(f"Plan takes a tuple of jf.Method, one per block, not {short(self.methods)}")
        object.__setattr__(self, "methods", methods)

    def __repr__(self) -> str:
        rows = [f"Plan of {len(self)} blocks, the one next to the noise first"]
        for words, run in groupby(range(len(self)), lambda i: self[i].in_words()):
            first, *more = run
            rows.append(f"  {f'blocks {first}-{more[-1]}' if more else f'block {first}'}: {words}")
        return "\n".join(rows)

    def __iter__(self) -> Iterator[Method]:
        return iter(self.methods)

    def __len__(self) -> int:
        return len(self.methods)

    def __getitem__(self, i: int) -> Method:
        return self.methods[i]

    @classmethod
    def sequential(cls, blocks: int) -> Plan:
        """Exact: one position at a time in every block."""
        return cls((Method(width=1),) * as_int("blocks", blocks))

    @classmethod
    def uniform(cls, blocks: int, *, tol: float, init: Init | None = None) -> Plan:
        """Whole-sequence sweeps in every block."""
        return cls((Method(width=None, tol=tol, init=init),) * as_int("blocks", blocks))

    @classmethod
    def selective(cls, blocks: int, *, tol: float, init: Init | None = None) -> Plan:
        """Sequential in the block next to the noise, whole-sequence sweeps in the others."""
        rest = cls.uniform(max(as_int("blocks", blocks) - 1, 0), tol=tol, init=init)
        return cls((Method(width=1),)[:blocks] + rest.methods)

    def resolved(self, unit: Unit, *, calibrated: bool = False) -> Plan:
        return Plan(tuple(m.resolved(unit, calibrated=calibrated) for m in self), about=self.about)

    def to_json(self) -> str:
        doc = {"format": FORMAT, "version": VERSION, "methods": [asdict(m) for m in self]}
        return json.dumps(doc | ({"about": self.about} if self.about else {}), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, name: str = "the plan") -> Plan:
        """The plan of `to_json`, also of version 1; one warning says so if its methods mean something else now."""
        try:
            doc = json.loads(text)  # `about` may hold Infinity
        except (TypeError, ValueError, RecursionError) as error:
            raise PlanError(f"a plan must be JSON: {error}") from None
        if not isinstance(doc, dict) or doc.get("format") != FORMAT:
            raise PlanError(f'a plan must be a JSON object with "format": "{FORMAT}"')
        version = doc.get("version")
        if type(version) is not int or not 1 <= version <= VERSION:
            raise PlanError(f"this release reads plans of version 1 to {VERSION}, not {version!r}")
        body = {key: doc[key] for key in ("methods", "about") if key in doc}
        if isinstance(body.get("methods"), list) and len(body["methods"]) > MOST:
            raise PlanError(f"the plan has {len(body['methods'])} methods, a flow has at most {MOST} blocks")
        try:
            plan = build(cls, body, "plan")
        except RecordError as error:
            raise PlanError(str(error)) from None
        if version == 1 and plan.has_windows:
            warn_once(f"{name} was made for closed windows: run tune again")
        return plan

    @property
    def has_windows(self) -> bool:
        """Whether version 1 meant something else: by a window of several positions, or max_sweeps."""
        return any((m.width or 1) > 1 or m.max_sweeps is not None for m in self)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        try:
            write_text(Path(path), self.to_json())
        except (OSError, TypeError, ValueError) as error:
            raise PlanError(f"cannot write the plan {path}: {error}") from None

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote."""
        try:
            return cls.from_json(read_text(Path(path)), name=f"the plan {path}")
        except (OSError, TypeError, ValueError) as error:
            why = getattr(error, "strerror", None) or error  # without its number and the path once more
            raise PlanError(f"cannot read the plan {path}: {why}") from None
