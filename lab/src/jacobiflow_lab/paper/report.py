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
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from jacobiflow_lab.paper.check_report import pictures_of
from jacobiflow_lab.paper.judge import judge_claims, verdict_word
from jacobiflow_lab.paper.models import SCALES
from jacobiflow_lab.paper.registry import ITEMS
from jacobiflow_lab.paper.runner import load_rows
from jacobiflow_lab.paper.schema import CLAIMS, PAGE, SUMMARY, Doc, Docs, Item, write
from jacobiflow_lab.paper.tables import FID_BIAS, Number, layout

Pictures = Mapping[str, bytes]  # PNG files by their SHA-256 digest
WIDE_TABLE_COLUMNS = 7  # a table with this many is not set beside the paper's


def write_report(
    out: Path, docs: Mapping[str, Docs], claims: Sequence[Doc], *, to: Path | None = None
) -> Path:
    """Write claims, summary and report of the run in `out` into its folder, or as a public copy into `to`.

    The public copy has the JSON files, and no pictures that may not be redistributed.
    """
    pictures = {
        picture["sha256"]: path.read_bytes()
        for item, rows in docs.items()
        for doc in rows.values()
        for picture in doc.get("pictures", ())
        if (path := out / item / picture["file"]).is_file()
    }
    if to is None:
        return _write(out, docs, claims, pictures)
    for item, rows in docs.items():
        (to / item).mkdir(parents=True, exist_ok=True)
        for model in rows:
            shutil.copyfile(out / item / f"{model}.json", to / item / f"{model}.json")
    return _write(to, docs, claims, pictures, public=True)


def render_again(folder: Path, scale: str = "cpu") -> Path:
    """Make the page of a public copy again from its JSON, after a template or a claim has changed."""
    docs = load_rows(folder, list(ITEMS.values()), SCALES[scale])
    return _write(folder, docs, judge_claims(docs), pictures_of(folder / PAGE), public=True)


def _write(
    folder: Path, docs: Mapping[str, Docs], claims: Sequence[Doc], pictures: Pictures, public: bool = False
) -> Path:
    for name, doc in ((CLAIMS, list(claims)), (SUMMARY, summarise(docs))):
        (folder / name).write_text(json.dumps(doc, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page = folder / PAGE
    page.write_text(render(docs, claims, pictures, public), encoding="utf-8")
    return page


def summarise(docs: Mapping[str, Docs]) -> Doc:
    """Where and by what everything on the page was measured, and how long it took."""
    every = [doc for found in docs.values() for doc in found.values() if "data" in doc]
    return {
        "machines": sorted({f"{d['machine']}, {d['threads']} threads ({d['device']})" for d in every}),
        "commits": sorted({d["commit"] for d in every}),
        "commands": list(dict.fromkeys(d["command"] for d in every)),
        "measured": len(every),
        "minutes": sum(d["minutes"] for d in every),
    }


def render(docs: Mapping[str, Docs], claims: Sequence[Doc], pictures: Pictures, public: bool) -> str:
    """The page. public: pictures that may not be redistributed are left out, and a line says so."""
    environment = Environment(
        loader=PackageLoader("jacobiflow_lab.paper"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"verdict": verdict_word, "written": write}
    environment.tests["number"] = lambda part: isinstance(part, Number)
    items = list(ITEMS.values())
    tried = [item for item in items if docs[item.name]]
    return environment.get_template("report.html").render(
        about=summarise(docs),
        claims=claims,
        sections=[_section(item, docs[item.name], claims, pictures, public) for item in tried],
        untried=[item for item in items if not docs[item.name]],
        measured=sum(any("data" in doc for doc in docs[item.name].values()) for item in items),
        fid_bias=FID_BIAS,
        claims_file=CLAIMS,
        summary_file=SUMMARY,
    )


def _section(
    item: Item, docs: Docs, claims: Sequence[Doc], pictures: Pictures, public: bool
) -> dict[str, Any]:
    """What the template shows of one item."""
    grids = [layout(table, docs) for table in item.tables]
    printed = [layout(table, docs) for table in item.paper.tables]
    scale = SCALES[next(iter(docs.values()))["scale"]]
    every = [picture for doc in docs.values() for picture in doc.get("pictures", ())]
    hidden = {p["sha256"] for p in every if p["restricted"] and (public or p["sha256"] not in pictures)}
    shown = [p for p in every if p["sha256"] not in hidden]
    return {
        "item": item,
        "docs": docs,
        "tables": grids,
        "printed": printed,
        "wide": any(len(grid.head) >= WIDE_TABLE_COLUMNS for grid in (*grids, *printed)),
        "absent": [model for model in item.models(scale) if model not in docs],
        "claims": [(i, claim) for i, claim in enumerate(claims) if claim["item"] == item.name],
        "pictures": every,
        "base64": {p["sha256"]: base64.b64encode(pictures[p["sha256"]]).decode() for p in shown},
    }
