"""What a run leaves in its folder, and the copy of it that may be handed on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from jacobiflow_lab.paper.item import Doc, Docs, Item
from jacobiflow_lab.paper.report import CLAIMS, PAGE, SUMMARY, render, summarise


def conclude(
    out: Path,
    items: Sequence[Item],
    docs: Mapping[str, Docs],
    claims: Sequence[Doc],
    *,
    to: Path | None = None,
) -> Path:
    """Write claims, summary and report of the run in `out` there, or into another folder `to`.

    Another folder gets the JSON too, and a report without pictures that may not be handed on.
    """
    folder = out if to is None else to
    folder.mkdir(parents=True, exist_ok=True)
    if to is not None:
        for item in items:
            (to / item.name).mkdir(exist_ok=True)
            for model in docs[item.name]:
                shutil.copyfile(out / item.name / f"{model}.json", to / item.name / f"{model}.json")
    for name, doc in ((CLAIMS, list(claims)), (SUMMARY, summarise(docs))):
        (folder / name).write_text(json.dumps(doc, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    page = folder / PAGE
    page.write_text(render(items, docs, claims, out, public=to is not None), encoding="utf-8")
    return page
