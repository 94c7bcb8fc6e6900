"""Runs items on models, one JSON file each; what is there already is not measured again."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jacobiflow.core.records import RecordError, parse_json, read_text
from jacobiflow.core.types import JacobiflowError
from jacobiflow.flows.checkpoint import write_atomically
from jacobiflow.paper.item import Doc, Item, Missing
from jacobiflow.paper.models import Scale
from jacobiflow.paper.provenance import provenance
from jacobiflow.paper.workshop import Context, Workshop

FORMAT = "jacobiflow-paper"
VERSION = 1


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
        left -= item.minutes(shop.scale, model)
        state = "not measured: " + doc["missing"] if "missing" in doc else "measured" if fresh else "kept"
        took = f" in {time.perf_counter() - began:.0f} s" if fresh else ""
        say(f"[{i + 1}/{len(pairs)}] {item.name} of {model}: {state}{took}; about {left:.0f} min to go")
    return docs


def run_one(shop: Workshop, item: Item, model: str, *, command: str, again: bool) -> tuple[Doc, bool]:
    """The JSON of one item on one model, and whether it was measured now."""
    folder = shop.out / item.name
    folder.mkdir(parents=True, exist_ok=True)
    context = Context(shop, model, folder)
    path = folder / f"{model}.json"
    held = load(path)
    try:
        settings = settings_of(context, item)
    except JacobiflowError as error:
        if held is not None and "data" in held:
            return held, False
        return _write(path, _head(item, model, command, shop) | {"missing": str(error)}), False
    if held is not None and not again and "data" in held and held.get("settings") == settings:
        return held, False
    began = time.perf_counter()
    doc = _head(item, model, command, shop) | {"settings": settings}
    try:
        found = item.run(context)
    except (Missing, JacobiflowError) as error:
        if isinstance(error, Missing) and held is not None and "data" in held:
            return held, False  # measured where the weights, or the run of their training, were
        return _write(path, doc | {"missing": str(error)}), False
    doc |= {
        "counts": found.counts,
        "seeds": found.seeds,
        "minutes": (time.perf_counter() - began) / 60,
        "data": plain(found.data),
        "pictures": [picture.to_dict(folder) for picture in found.pictures],
    }
    return _write(path, doc), True


def settings_of(context: Context, item: Item) -> Doc:
    """What decides the answer; Missing if the model is not there."""
    shop, scale = context.workshop, context.scale
    found: Doc = {
        "scale": scale.name,
        "samples": shop.samples or scale.samples,
        "seed": shop.seed,
        "clip": shop.clip,
        "weights": context.weights(),
    }
    lists = ("images", "judged", "generators")
    found |= {k: v for k, v in vars(scale).items() if k not in ("name", "samples", *lists)}
    found["judged"] = context.model in scale.judged
    return dict(json.loads(json.dumps(found | item.settings(context))))


def load(path: Path) -> Doc | None:
    """The JSON of an earlier run, if there is one that can be read and whose pictures are there."""
    try:
        doc = parse_json(read_text(path))
    except (OSError, RecordError, ValueError):
        return None
    if not isinstance(doc, dict) or doc.get("format") != FORMAT or doc.get("version") != VERSION:
        return None
    whole = all((path.parent / picture["file"]).is_file() for picture in doc.get("pictures", ()))
    return doc if whole else None


def load_all(out: Path, items: Sequence[Item], scale: Scale) -> dict[str, dict[str, Doc]]:
    """Everything of this scale that is in a folder, in the order of its models."""
    found: dict[str, dict[str, Doc]] = {}
    for item in items:
        paths = {model: out / item.name / f"{model}.json" for model in item.models(scale)}
        found[item.name] = {model: doc for model, path in paths.items() if (doc := load(path)) is not None}
    return found


def plain(value: Any) -> Any:
    """As JSON has it: numbers that are not finite become None, tuples lists."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
