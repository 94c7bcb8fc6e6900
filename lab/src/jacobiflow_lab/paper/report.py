"""report.html: one self-contained page whose every number names the JSON that it comes from.

The page is made by the templates in `templates/`. A number is written as
<b data-json="ITEM/MODEL.json" data-at="data/..." data-format="...">...</b>, a picture as
<img data-sha256="..."> and a verdict as <span data-verdict="...">. `check_report` compares them with the
files beside the page.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from jacobiflow_lab.paper.check_report import pictures_of
from jacobiflow_lab.paper.claims import judge_claims, verdict_word
from jacobiflow_lab.paper.models import MODELS, SCALES
from jacobiflow_lab.paper.paper_items import PAPER_ITEMS
from jacobiflow_lab.paper.registry import every_item
from jacobiflow_lab.paper.runner import load_rows
from jacobiflow_lab.paper.schema import CLAIMS, PAGE, SUMMARY, Doc, Docs, write
from jacobiflow_lab.paper.tables import FID_BIAS, TABLES, Number, layout, sections

Pictures = Mapping[str, bytes]  # PNG files by their SHA-256 digest
LICENCE = "LICENSE-AFHQ.txt"  # beside a page with pictures of AFHQ
WORDS = ("holds", "does not hold", "cannot be told")
HEADLINES = (  # claims of the summary, in its order
    *("faster", "faster-small-batch", "faster-compiled", "quality", "reconstruction"),
    *("first-block", "later-blocks", "superlinear", "first-guess"),
)


def write_report(out: Path, docs: Mapping[str, Docs], claims: Sequence[Doc], *, to: Path | None = None) -> Path:
    """Write claims, summary and report of the run in `out` into its folder, or as a copy into `to`.

    The copy has the JSON files; its pictures are in the page.
    """
    pictures = {
        picture["sha256"]: path.read_bytes()
        for item, rows in docs.items()
        for doc in rows.values()
        for picture in doc.get("pictures", ())
        if (path := out / item / picture["file"]).is_file()
    }
    if to is not None:
        for item, rows in docs.items():
            (to / item).mkdir(parents=True, exist_ok=True)
            for model in rows:
                shutil.copyfile(out / item / f"{model}.json", to / item / f"{model}.json")
    return _write(to or out, docs, claims, pictures)


def render_again(folder: Path, scale: str = "cpu") -> Path:
    """Make the page of a copy again from its JSON, after a template or a claim has changed."""
    docs = load_rows(folder, list(every_item().values()), SCALES[scale])
    return _write(folder, docs, judge_claims(docs), pictures_of(folder / PAGE))


def _write(folder: Path, docs: Mapping[str, Docs], claims: Sequence[Doc], pictures: Pictures) -> Path:
    about = summarise(docs, claims)
    for name, doc in ((CLAIMS, list(claims)), (SUMMARY, about)):
        (folder / name).write_text(json.dumps(doc, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if any(picture["restricted"] for picture in _pictures(docs)):
        text = (files("jacobiflow_lab.paper") / "templates" / LICENCE).read_text(encoding="utf-8")
        (folder / LICENCE).write_text(text, encoding="utf-8")
    page = folder / PAGE
    page.write_text(render(docs, claims, pictures, about), encoding="utf-8")
    return page


def _pictures(docs: Mapping[str, Docs]) -> list[Doc]:
    """All pictures, each with the section that shows it."""
    return [
        picture | {"section": picture["section"] or item}
        for item, rows in docs.items()
        for doc in rows.values()
        for picture in doc.get("pictures", ())
    ]


def summarise(docs: Mapping[str, Docs], claims: Sequence[Doc]) -> Doc:
    """Where and by what everything on the page was measured, how long it took, and the verdicts by word."""
    every = [doc for found in docs.values() for doc in found.values() if "data" in doc]
    words = [(verdict_word(entry), claim["ours"]) for claim in claims for entry in claim["models"].values()]
    return {
        "machines": sorted({f"{d['machine']}, {d['threads']} threads ({d['device']})" for d in every}),
        "commits": sorted({d["commit"] for d in every}),
        "commands": list(dict.fromkeys(d["command"] for d in every)),
        "measured": len(every),
        "minutes": sum(d["minutes"] for d in every),
        "verdicts": {word: words.count((word, False)) for word in WORDS},
        "verdicts_ours": {word: words.count((word, True)) for word in WORDS},
        "clip": any(doc["settings"]["clip"] for doc in every),
    }


def render(docs: Mapping[str, Docs], claims: Sequence[Doc], pictures: Pictures, about: Doc) -> str:
    """The page."""
    environment = Environment(
        loader=PackageLoader("jacobiflow_lab.paper"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"verdict": verdict_word, "written": write}
    environment.tests["number"] = lambda part: isinstance(part, Number)
    every = [_section(name, docs, claims, pictures) for name in PAPER_ITEMS]
    numbered = {claim["name"]: (i, claim) for i, claim in enumerate(claims)}
    first = next((p for p in _pictures(docs) if p["section"] == "samples" and p["sha256"] in pictures), None)
    return environment.get_template("report.html").render(
        about=about,
        claims=claims,
        headlines=[numbered[name] for name in HEADLINES],
        small={name for name, model in MODELS.items() if model.small},
        sections=[section for section in every if section["docs"]],
        untried=[section["paper"] for section in every if not section["docs"]],
        picture=first,
        base64={digest: base64.b64encode(content).decode() for digest, content in pictures.items()},
        licence=LICENCE,
        fid_bias=FID_BIAS,
        claims_file=CLAIMS,
        summary_file=SUMMARY,
    )


def _section(name: str, docs: Mapping[str, Docs], claims: Sequence[Doc], pictures: Pictures) -> dict[str, Any]:
    """What the template shows beside one table or figure of the paper."""
    items = [item for item in every_item().values() if name in sections(item.name) and docs[item.name]]
    return {
        "name": name,
        "paper": PAPER_ITEMS[name],
        "docs": {item.name: docs[item.name] for item in items},
        "tables": [
            layout(table, docs[item.name], item.name)
            for item in items
            for table in TABLES[item.name]
            if (table.section or item.name) == name
        ],
        "printed": [layout(table, {}) for table in PAPER_ITEMS[name].tables],
        "claims": [(i, claim) for i, claim in enumerate(claims) if claim["section"] == name],
        "pictures": [p for p in _pictures(docs) if p["section"] == name and p["sha256"] in pictures],
    }
