"""Runs items on models, one JSON file each; what is there already is not measured again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jacobiflow.core.files import write_atomically
from jacobiflow.core.records import RecordError, as_json, parse_json, read_text
from jacobiflow.core.types import JacobiflowError
from jacobiflow_lab.paper.item import Doc, Item, Lacking, Missing
from jacobiflow_lab.paper.models import Scale
from jacobiflow_lab.paper.provenance import provenance
from jacobiflow_lab.paper.reading import pictures_of
from jacobiflow_lab.paper.report import PAGE
from jacobiflow_lab.paper.workshop import Context, Workshop

FORMAT = "jacobiflow-paper"
VERSION = 2


def run_items(
    shop: Workshop,
    items: Sequence[Item],
    *,
    models: Sequence[str] = (),
    command: str,
    again: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, dict[str, Doc]]:
    """The JSON of every item and model, by names. models: only these; none is all of the scale."""
    pairs = [(item, m) for item in items for m in item.models(shop.scale) if not models or m in models]
    left = sum(item.minutes(shop.scale, model) for item, model in pairs)
    docs: dict[str, dict[str, Doc]] = {item.name: {} for item in items}
    for i, (item, model) in enumerate(pairs):
        began = time.perf_counter()
        doc, fresh = run_one(shop, item, model, command=command, again=again)
        docs[item.name][model] = doc
        left = max(left - item.minutes(shop.scale, model), 0.0)
        state = state_of(doc, fresh)
        took = f" in {time.perf_counter() - began:.0f} s" if fresh else ""
        say(f"[{i + 1}/{len(pairs)}] {item.name} of {model}: {state}{took}; about {left:.0f} min to go")
    return docs


def state_of(doc: Doc, fresh: bool) -> str:
    """One word or line on where a row comes from."""
    if "missing" in doc:
        return f"not measured: {doc['missing']}"
    if fresh:
        return "measured"
    return f"from the record of commit {doc['commit']}" if "record" in doc else "kept"


def run_one(shop: Workshop, item: Item, model: str, *, command: str, again: bool) -> tuple[Doc, bool]:
    """The JSON of one item on one model, and whether it was measured now.

    Where weights are missing, what was measured when they were there stands: in --out, else in --records.
    """
    folder = shop.out / item.name
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(shop, model, folder)
    path = folder / f"{model}.json"
    held = load(path)
    head = _head(item, model, command, shop)
    settings: Doc = {}
    lacking = ""
    try:
        settings = settings_of(context, item)
        if held is not None and not again and is_whole(held, settings):
            return held, False
        item.needs(context)
    except JacobiflowError as error:
        if (record := stand_in(shop, item, model, held, settings)) is not None:
            return _write(path, record), False
        lacking = str(error)
        if not isinstance(error, Lacking):
            return _write(path, head | {"missing": lacking}), False
    began = time.perf_counter()
    doc = head | {"settings": settings}
    try:
        result = item.run(context)
    except JacobiflowError as error:
        record = stand_in(shop, item, model, held, settings) if isinstance(error, Missing) else None
        return _write(path, record or doc | {"missing": str(error)}), False
    doc |= {
        "counts": result.counts,
        "seeds": result.seeds,
        "minutes": (time.perf_counter() - began) / 60,
        "data": as_json(result.data),
        "pictures": [picture.to_dict(folder) for picture in result.pictures],
    }
    return _write(path, doc | ({"lacking": lacking} if lacking else {})), True


def is_whole(doc: Doc, settings: Doc | None = None) -> bool:
    """Whether nothing is missing in it, and it was measured here with these settings if any are given."""
    if "data" not in doc:
        return False
    if settings is None:
        return "lacking" not in doc
    return "record" not in doc and doc.get("settings") == settings


def stand_in(shop: Workshop, item: Item, model: str, held: Doc | None, settings: Doc) -> Doc | None:
    """What was measured where everything was there: by this folder, else by a published report."""
    mine = held if held is not None and fits(held, item, settings) else None
    if mine is not None and "record" not in mine:
        return mine
    return recorded(shop, item, model, settings) or mine


def fits(doc: Doc, item: Item, settings: Doc) -> bool:
    """Whether it is whole, and about the weights of `settings`, if it has any and the item is about them."""
    return is_whole(doc) and (
        item.of_run or not settings or doc["settings"]["weights"] == settings["weights"]
    )


def recorded(shop: Workshop, item: Item, model: str, settings: Doc) -> Doc | None:
    """What a published report says, marked as its record; its pictures are taken out of its page."""
    if shop.records is None:
        return None
    doc = _read(shop.records / item.name / f"{model}.json")
    if doc is None or not fits(doc, item, settings) or doc.get("scale") != shop.scale.name:
        return None
    page = shop.records / PAGE
    pictures = shop.once(("pictures", page), lambda: pictures_of(page) if page.is_file() else {})
    public = [picture for picture in doc["pictures"] if not picture["restricted"]]
    if any(picture["sha256"] not in pictures for picture in public):
        return None
    for picture in public:
        (shop.out / item.name / picture["file"]).write_bytes(pictures[picture["sha256"]])
    return doc | {"record": True}


def settings_of(context: Context, item: Item) -> Doc:
    """What decides the answer; Missing if the model is not there."""
    shop, scale = context.workshop, context.scale
    found: Doc = {
        "scale": scale.name,
        "samples": shop.samples or scale.samples,
        "seed": shop.seed,
        "clip": shop.clip,
        "guidance": shop.guidance,
        "weights": context.weights(),
    }
    lists = ("images", "judged", "generators")
    found |= {k: v for k, v in vars(scale).items() if k not in ("name", "samples", *lists)}
    found["judged"] = context.model in scale.judged
    return dict(json.loads(json.dumps(found | item.settings(context))))


def load(path: Path) -> Doc | None:
    """The JSON of an earlier run, if there is one that can be read and whose pictures are there.

    A record has no pictures that may not be handed on.
    """
    doc = _read(path)
    wanted = [] if doc is None else doc.get("pictures", ())
    there = [
        (path.parent / picture["file"]).is_file() or (picture["restricted"] and "record" in (doc or {}))
        for picture in wanted
    ]
    return doc if all(there) else None


def _read(path: Path) -> Doc | None:
    try:
        doc = parse_json(read_text(path))
    except (OSError, RecordError, ValueError):
        return None
    known = isinstance(doc, dict) and doc.get("format") == FORMAT and doc.get("version") == VERSION
    return doc if known else None


def load_all(out: Path, items: Sequence[Item], scale: Scale) -> dict[str, dict[str, Doc]]:
    """Everything of this scale that is in a folder, in the order of its models."""
    found: dict[str, dict[str, Doc]] = {}
    for item in items:
        paths = {model: out / item.name / f"{model}.json" for model in item.models(scale)}
        found[item.name] = {model: doc for model, path in paths.items() if (doc := load(path)) is not None}
    return found


def _head(item: Item, model: str, command: str, shop: Workshop) -> Doc:
    head: Doc = {
        "format": FORMAT,
        "version": VERSION,
        "item": item.name,
        "shows": item.shows,
        "model": model,
        "scale": shop.scale.name,
    }
    return head | provenance(command, shop.device)


def _write(path: Path, doc: Doc) -> Doc:
    text = json.dumps(doc, indent=1, allow_nan=False) + "\n"
    write_atomically(path, lambda name: Path(name).write_text(text, encoding="utf-8"))
    return dict(json.loads(text))
