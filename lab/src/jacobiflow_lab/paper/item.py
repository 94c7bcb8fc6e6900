"""What every item of the paper has in common: its name, what it measures, its tables and pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jacobiflow.core.types import JacobiflowError

if TYPE_CHECKING:
    from jacobiflow_lab.paper.workshop import Context

BIASED = "FID is biased upwards at small counts, by the same amount only for equal counts; KID is not biased."
UNEQUAL = "Rows of unequal counts are of other samples: compare their paired distances, not their KID."

Doc = dict[str, Any]  # the JSON of one item on one model
Docs = Mapping[str, Doc]  # of one item, by model


class Missing(JacobiflowError):
    """Data, weights or a package that a row needs and that is not there; the text is the row's."""


class Lacking(Missing):
    """Some rows of an item cannot be measured, the others can."""


@dataclass(frozen=True)
class Picture:
    """A PNG beside the JSON. `restricted`: made of data whose licence forbids handing it on."""

    file: str
    caption: str
    restricted: bool = False

    def to_dict(self, folder: Path) -> Doc:
        """Plain data, with the digest that says which picture it was."""
        digest = hashlib.sha256((folder / self.file).read_bytes()).hexdigest()
        return {
            "file": self.file,
            "caption": self.caption,
            "restricted": self.restricted,
            "sha256": digest,
        }


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an item measured on one model: plain data, pictures, and how many of what it looked at."""

    data: Doc
    counts: dict[str, int]
    seeds: dict[str, int] = field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Figure:
    """One number of a table: where it stands in the JSON of a model, and how it is written."""

    model: str
    pointer: str  # keys and indices between slashes, below "data"
    format: str = "{:.2f}"

    def value(self, docs: Docs) -> Any:
        """What the JSON says; None where it says nothing."""
        return find(docs.get(self.model, {}).get("data"), self.pointer)

    def text(self, docs: Docs) -> str:
        """As it is printed."""
        return write(self.value(docs), self.format)


def find(doc: Any, pointer: str) -> Any:
    """The entry of nested dicts and lists at keys and indices between slashes, or None.

    >>> find({"rows": [{"seconds": 1.5}]}, "rows/0/seconds")
    1.5
    """
    for key in pointer.split("/"):
        if isinstance(doc, list) and key.isdigit() and int(key) < len(doc):
            doc = doc[int(key)]
        elif isinstance(doc, dict) and key in doc:
            doc = doc[key]
        else:
            return None
    return doc


def write(value: Any, form: str) -> str:
    """A number by its format; a text is itself, nothing is a dash.

    >>> write(3.14159, "{:.2f}"), write(None, "{:.2f}"), write("a-b", "{:.2f}")
    ('3.14', '–', 'a-b')
    """
    if value is None:
        return "–"
    return value if isinstance(value, str) else form.format(value)


Cell = str | Figure | tuple[str | Figure, ...]  # several stand side by side


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of ours (cells point into the JSON) or of the paper (cells are its text)."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure family of the paper.

    `run` measures one model; `tables` writes what is known of all models; both know nothing of files
    but the pictures that they draw.
    """

    name: str
    title: str
    shows: str  # which table or figure of the paper
    models: Callable[[Any], tuple[str, ...]]  # of a Scale
    run: Callable[[Context], Result]
    tables: Callable[[Docs], list[Table]]
    theirs: tuple[Table, ...] = ()  # the paper's own figures
    words: str = ""  # what the paper shows, where it is a picture
    minutes: Callable[[Any, str], float] = lambda scale, model: 1.0  # estimate at CPU scale, on two cores
    settings: Callable[[Context], Doc] = lambda context: {}  # what decides the answer, beside the scale
    of_run: bool = False  # about a training run, not about the weights that it ended with
    needs: Callable[[Context], object] = lambda context: None  # raises Missing or Lacking, beside the model


def cell_text(cell: Cell, docs: Docs) -> str:
    """A cell as plain text."""
    parts = cell if isinstance(cell, tuple) else (cell,)
    return "".join(part if isinstance(part, str) else part.text(docs) for part in parts)


def missing_rows(docs: Docs, width: int) -> list[Sequence[Cell]]:
    """A row for each model that could not be measured: its name, and why."""
    return [
        (model, str(doc["missing"]), *[""] * (width - 2)) for model, doc in docs.items() if "missing" in doc
    ]


def present(docs: Docs) -> list[str]:
    """The models that were measured."""
    return [model for model, doc in docs.items() if "data" in doc]
