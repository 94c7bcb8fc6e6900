"""Runs items on models. Each writes one JSON file; a rerun measures only what is not there yet.

Where a row comes from depends on what is there. The first source that has it is used:

| models and data  | sources in order                                             |
|------------------|--------------------------------------------------------------|
| all there        | kept, measured                                               |
| partly missing   | kept, held, recorded, measured (the rows that can be)        |
| missing          | held, recorded, missing                                      |
| an item failed   | missing                                                      |

kept: --out has it with the same settings, and --again was not given. held: --out has all of it, measured when
everything was there, perhaps with other settings. recorded: --records has all of it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path

from jacobiflow.core.files import read_text, write_text
from jacobiflow.core.records import RecordError, as_json, parse_json
from jacobiflow.core.results import JacobiflowError
from jacobiflow_lab.paper.check_report import pictures_of
from jacobiflow_lab.paper.models import Scale
from jacobiflow_lab.paper.provenance import provenance
from jacobiflow_lab.paper.schema import PAGE, Doc, Item, Missing, PartiallyMissing
from jacobiflow_lab.paper.session import Session, Task
from jacobiflow_lab.paper.tables import shows

FORMAT = "jacobiflow-paper"
VERSION = 3


class Needs(Enum):
    """How much of what an item needs is there. The value lists the sources of a row: methods of _Row."""

    PRESENT = ("kept", "measured")
    PARTIAL = ("kept", "held", "recorded", "measured")
    ABSENT = ("held", "recorded", "missing")
    FAILED = ("missing",)


def run_items(
    session: Session,
    items: Sequence[Item],
    *,
    models: Sequence[str] = (),
    command: str,
    again: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Doc]]:
    """The JSON of every item and model, by names. models: only these; empty: all of the scale."""
    pairs = [(item, m) for item in items for m in item.models(session.scale) if not models or m in models]
    scale = session.scale.sized(session.samples)
    planned = [item.minutes(scale, model) for item, model in pairs]
    estimate = Estimate(sum(planned))
    session.rows.update({item.name: {} for item in items})
    for i, ((item, model), minutes) in enumerate(zip(pairs, planned, strict=True)):
        began = time.perf_counter()
        source, doc = _Row(session, item, model, command, again).get()
        session.rows[item.name][model] = doc
        seconds = time.perf_counter() - began
        estimate.add(minutes, seconds / 60 if source == "measured" else None)
        state = f"from the record of commit {doc['commit']}" if "record" in doc else "kept"
        if source == "missing":
            state = f"not measured: {doc['missing']}"
        elif source == "measured":
            state = f"measured in {seconds:.0f} s"
        progress(f"[{i + 1}/{len(pairs)}] {item.name} of {model}: {state}; {estimate}")
    return {item.name: session.rows[item.name] for item in items}


class Estimate:
    """Progress of a whole run. The pace of what was measured corrects the minutes that were planned.

    >>> estimate = Estimate(10.0)
    >>> estimate.add(1.0, None), str(estimate)  # kept from an earlier run
    (None, '10% done, about 9 min left')
    >>> estimate.add(3.0, 6.0), str(estimate)  # twice as slow as planned
    (None, '40% done, about 12 min left')
    """

    def __init__(self, planned: float) -> None:
        self.total = self.left = planned
        self.expected = self.spent = 0.0  # minutes of what was measured

    def add(self, planned: float, spent: float | None) -> None:
        """A row is there. spent: minutes; None: it was not measured."""
        self.left = max(self.left - planned, 0.0)
        if spent is not None:
            self.expected += planned
            self.spent += spent

    def __str__(self) -> str:
        left = self.left * (self.spent / self.expected if self.expected else 1.0)
        done = 1 - self.left / self.total if self.total else 1.0
        return f"{done:.0%} done, about " + (f"{left:.0f} min left" if left < 120 else f"{left / 60:.1f} h left")


class _Row:
    """One item on one model, on its way to a JSON file."""

    def __init__(self, session: Session, item: Item, model: str, command: str, again: bool) -> None:
        folder = session.out / item.name
        folder.mkdir(parents=True, exist_ok=True)
        self.session, self.item, self.command = session, item, command
        self.task = Task(session, model, folder)
        self.path = folder / f"{model}.json"
        self.earlier = load(self.path)
        self.may_keep = not again
        self.settings: Doc = {}  # {}: the model is not there
        self.reason = ""  # what is missing

    def get(self) -> tuple[str, Doc]:
        """The row and its source; writes its JSON file."""
        source, doc = self.first_source(self.check_needs())
        if doc != self.earlier:
            text = json.dumps(doc, indent=1, allow_nan=False) + "\n"
            write_text(self.path, text)
            doc = dict(json.loads(text))
        return source, doc

    def check_needs(self) -> Needs:
        """How much is there; what is missing goes into `reason`."""
        try:
            self.settings = settings_of(self.task, self.item)
            self.item.needs(self.task)
        except JacobiflowError as error:
            self.reason = str(error)
            return Needs.PARTIAL if isinstance(error, PartiallyMissing) else Needs.ABSENT
        return Needs.PRESENT

    def first_source(self, needs: Needs) -> tuple[str, Doc]:
        """The first source of the table that has the row."""
        found = ((source, getattr(self, source)()) for source in needs.value)
        try:
            return next((source, doc) for source, doc in found if doc is not None)
        except JacobiflowError as error:  # while measuring
            self.reason = str(error)
            return self.first_source(Needs.ABSENT if isinstance(error, Missing) else Needs.FAILED)

    def kept(self) -> Doc | None:
        """The row of an earlier run with the same settings."""
        doc = self.earlier or {}
        same = "data" in doc and "record" not in doc and doc["settings"] == self.settings
        return self.earlier if self.may_keep and same else None

    def held(self) -> Doc | None:
        """The row of an earlier run that had everything. A newer record replaces a held one."""
        doc = self.earlier
        if doc is None or not self.is_complete(doc):
            return None
        return (self.recorded() or doc) if "record" in doc else doc

    def recorded(self) -> Doc | None:
        """The row of a published report, marked as its record; its pictures are taken from the page."""
        records, folder = self.session.records, self.path.parent
        doc = load(records / self.item.name / self.path.name, need_pictures=False) if records else None
        if records is None or doc is None or not self.is_complete(doc) or doc["scale"] != self.task.scale.name:
            return None
        page = records / PAGE
        pictures = self.session.once(page, lambda: pictures_of(page) if page.is_file() else {})
        if any(picture["sha256"] not in pictures for picture in doc["pictures"]):
            return None
        for picture in doc["pictures"]:
            (folder / picture["file"]).write_bytes(pictures[picture["sha256"]])
        return doc | {"record": True}

    def is_complete(self, doc: Doc) -> bool:
        """Whether all of it was measured, on these weights if they are here and the item is about weights."""
        if "data" not in doc or "lacking" in doc:
            return False
        any_weights = self.item.of_run or not self.settings
        return any_weights or bool(doc["settings"]["weights"] == self.settings["weights"])

    def measured(self) -> Doc:
        """A new row."""
        began = time.perf_counter()
        result = self.item.run(self.task)
        pictures = [picture.to_dict(self.path.parent) for picture in result.pictures]
        doc = self.head() | {
            "counts": result.counts,
            "seeds": {"noise": self.session.seed} if self.item.noise else {},
            "minutes": (time.perf_counter() - began) / 60,
            "data": as_json(result.data),
            "pictures": pictures,
        }
        return doc | ({"lacking": self.reason} if self.reason else {})

    def missing(self) -> Doc:
        """A row that says what is missing."""
        return self.head() | {"missing": self.reason}

    def head(self) -> Doc:
        """What every JSON file starts with."""
        about = {"item": self.item.name, "shows": shows(self.item.name), "model": self.task.model}
        head = {"format": FORMAT, "version": VERSION} | about | {"scale": self.task.scale.name}
        settings = {"settings": self.settings} if self.settings else {}
        return head | provenance(self.command, self.session.device) | settings


def settings_of(task: Task, item: Item) -> Doc:
    """What decides the result. Missing if the model is not there."""
    session, scale = task.session, task.scale
    lists = ("name", "samples", "images", "judged", "generators", "seconds_per_image")
    settings: Doc = {
        "scale": scale.name,
        "samples": session.samples or scale.samples,
        "seed": session.seed,
        "clip": session.clip,
        "guidance": session.guidance,
        "weights": task.weights(),
        "judged": task.model in scale.judged,
    }
    settings |= {key: value for key, value in vars(scale).items() if key not in lists}
    return dict(json.loads(json.dumps(settings | item.settings(task))))


def load(path: Path, *, need_pictures: bool = True) -> Doc | None:
    """The JSON of an earlier run, if it is readable and its pictures are there."""
    try:
        doc = parse_json(read_text(path))
    except (OSError, RecordError, ValueError):
        return None
    if not isinstance(doc, dict) or doc.get("format") != FORMAT or doc.get("version") != VERSION:
        return None
    there = all((path.parent / picture["file"]).is_file() for picture in doc.get("pictures", ()))
    return doc if there or not need_pictures else None


def load_rows(
    out: Path, items: Sequence[Item], scale: Scale, measured: dict[str, dict[str, Doc]] | None = None
) -> dict[str, dict[str, Doc]]:
    """All rows of a scale by item and model: those of `measured`, else what earlier runs left in `out`.

    measured: None for a public copy, whose pictures are in its page.
    """
    found: dict[str, dict[str, Doc]] = {}
    for item in items:
        ran, folder = (measured or {}).get(item.name, {}), out / item.name
        rows = {
            m: ran.get(m) or load(folder / f"{m}.json", need_pictures=measured is not None) for m in item.models(scale)
        }
        found[item.name] = {model: doc for model, doc in rows.items() if doc is not None}
    return found
