"""What the items of the paper share: the Item itself, its Result, and places in its JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

from jacobiflow.core.results import JacobiflowError

if TYPE_CHECKING:
    from jacobiflow_lab.paper.models import Scale
    from jacobiflow_lab.paper.session import Task

PAGE, CLAIMS, SUMMARY = "report.html", "claims.json", "summary.json"  # in the folder of a report
Doc = dict[str, Any]  # the JSON of one item on one model
Docs = Mapping[str, Doc]  # of one item, by model


class Missing(JacobiflowError):
    """Data, weights or a package that a row needs is not there. The message goes into the report."""


class PartiallyMissing(Missing):
    """Some rows of an item cannot be measured, the others can."""


@dataclass(frozen=True)
class Picture:
    """A PNG file beside the JSON. `restricted`: of AFHQ, which needs its attribution."""

    file: str
    caption: str
    restricted: bool = False
    section: str = ""  # of the page; default: the item's

    def to_dict(self, folder: Path) -> Doc:
        """As plain data, with the SHA-256 digest of the file."""
        digest = hashlib.sha256((folder / self.file).read_bytes()).hexdigest()
        return vars(self) | {"sha256": digest}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What an item measured on one model: plain data, sample counts and pictures."""

    data: Doc
    counts: dict[str, int]
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Item:
    """A measurement behind one or more tables and figures of the paper.

    `run` measures one model and writes no files but its pictures. `tables.toml` says how the JSON is shown,
    and in which sections of the page.
    """

    name: str
    run: Callable[[Task], Result]
    models: Callable[[Scale], tuple[str, ...]] = lambda scale: scale.images
    minutes: Callable[[Scale, str], float] = lambda scale, model: 0.2  # estimate per model, two cores
    settings: Callable[[Task], Doc] = lambda task: {}  # what else decides the result, beside the scale
    noise: bool = True  # whether the result depends on the seed of the noise
    of_run: bool = False  # about a training run, not about its final weights
    uses: tuple[str, ...] = ()  # items whose rows of the same model it shows too; they run before it
    needs: Callable[[Task], object] = lambda task: None  # raises Missing or PartiallyMissing


def find(doc: Any, pointer: str) -> Any:
    """The entry of nested dicts and lists at `pointer`, keys and indices between slashes, or None.

    An index may be name=value: the first entry of the list that has it.

    >>> data = {"rows": [{"plan": "a", "seconds": 1.5}, {"plan": "b", "seconds": 2.5}]}
    >>> find(data, "rows/0/seconds"), find(data, "rows/plan=b/seconds")
    (1.5, 2.5)
    """
    for key in filter(None, pointer.split("/")):
        if isinstance(doc, list) and key.removeprefix("-").isdigit() and -len(doc) <= int(key) < len(doc):
            doc = doc[int(key)]
        elif isinstance(doc, list) and "=" in key:
            name, _, value = key.partition("=")
            doc = next((entry for entry in doc if entry.get(name) == value), None)
        elif isinstance(doc, dict) and key in doc:
            doc = doc[key]
        else:
            return None
    return doc


def write(value: Any, form: str) -> str:
    """A number in its format; a text as it is; yes or no for a truth value; a dash for None.

    >>> write(3.14159, "{:.2f}"), write(None, "{:.2f}"), write("a-b", "{:.2f}"), write(True, "{}")
    ('3.14', '–', 'a-b', 'yes')
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else form.format(value)


def fill(template: str, data: Any) -> str:
    """A template whose fields are places in the data.

    >>> fill("It takes {rows/0/seconds:.1f} s.", {"rows": [{"seconds": 1.25}]})
    'It takes 1.2 s.'
    """
    parts = Formatter().parse(template)
    return "".join(t + ("" if f is None else write(find(data, f), f"{{:{spec}}}")) for t, f, spec, _ in parts)
