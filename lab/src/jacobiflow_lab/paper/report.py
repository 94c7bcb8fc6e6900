"""report.html: one self-contained page, every figure of which says which JSON it comes from.

A number is written as <b data-json="ITEM/MODEL.json" data-at="data/..." data-format="...">...</b>, a picture
as <img data-sha256="...">, a verdict as <span data-verdict="...">, so that anybody can check the page against
the files beside it (`reading.check`).
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from jacobiflow_lab.analysis.sweeps import TRAINED
from jacobiflow_lab.paper.claims import verdict_word
from jacobiflow_lab.paper.item import BIASED, Cell, Doc, Docs, Figure, Item, Table, find, write
from jacobiflow_lab.paper.models import SCALES

NUMBER = "{:.4g}"
FIRST = "data/plans/uniform, zeros/layers/0/mean"  # sweeps of the first block, all swept
PAGE, CLAIMS, SUMMARY = "report.html", "claims.json", "summary.json"


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


def render(
    items: Sequence[Item], docs: Mapping[str, Docs], claims: Sequence[Doc], out: Path, *, public: bool = False
) -> str:
    """The page. public: pictures that may not be handed on are left out, and a line says so.

    Items of which nothing was tried are named at its end.
    """
    style = (files("jacobiflow_lab.paper") / "report.css").read_text(encoding="utf-8")
    tried = [item for item in items if docs[item.name]]
    sections = [_section(item, docs[item.name], claims, out / item.name, public) for item in tried]
    sections += [_untried([item for item in items if not docs[item.name]])]
    links = "".join(f'<a href="#{item.name}">{escape(item.title)}</a>' for item in tried)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<title>jacobiflow beside the paper</title>\n"
        f"<style>\n{style}</style></head>\n<body><main>\n{_head(summarise(docs), items, docs)}\n"
        f'<nav><a href="#claims">Claims</a>{links}</nav>\n{_claims(claims)}\n' + "\n".join(sections) + "\n"
        "</main></body></html>\n"
    )


def _untried(items: Sequence[Item]) -> str:
    named = "; ".join(
        f"{escape(item.title)} ({escape(item.shows)}): <code>{item.name}</code>" for item in items
    )
    return f'<section id="untried"><h2>Not measured</h2><p>{named}.</p></section>' if items else ""


def _head(about: Doc, items: Sequence[Item], docs: Mapping[str, Docs]) -> str:
    there = sum(any("data" in doc for doc in docs[item.name].values()) for item in items)
    which = "all" if there == len(items) else f"{there}"
    minutes = _number(SUMMARY, "minutes", about["minutes"], "{:.0f}")
    measured = _number(SUMMARY, "measured", about["measured"], "{}")
    commands = "; ".join(f"<code>{escape(c)}</code>" for c in about["commands"])
    return (
        "<h1>Selective Jacobi decoding: our figures beside the paper’s</h1>\n"
        '<p class="lead">The tables and figures of Zhang et al., <i>Accelerating Inference of Discrete '
        "Autoregressive Normalizing Flows by Selective Jacobi Decoding</i> (TMLR 2026), measured again by "
        f"<code>jacobiflow reproduce</code>: {which} of {len(items)} items. Our models are small and our "
        "machine has no GPU unless it says "
        "so: compare directions and ratios, not seconds.</p>\n"
        f'<p class="facts">{measured} measurements in {minutes} minutes on '
        f"{escape('; '.join(about['machines']))}, commit {escape(', '.join(about['commits']))}. Made by "
        f"{commands}. Every JSON file names its own commit, command, versions, counts and seeds.</p>"
        f"{_doubts(docs.get('sweeps', {}))}"
    )


def _doubts(sweeps: Docs) -> str:
    """Which models may be called untrained: whatever the page says of them is to be read so."""
    named = [
        f"{escape(model)} ({_number(f'sweeps/{model}.json', FIRST, find(doc, FIRST), '{:.1f}')})"
        for model, doc in sweeps.items()
        if find(doc, "data/doubt")
    ]
    return (
        f'\n<p class="lead">Sweeps of the first block at tau 0.5 are under {TRAINED} in '
        f"{', '.join(named)}: by our own rule these look like models that are not trained to the end, and "
        "all that this page says of them is to be read so.</p>"
        if named
        else ""
    )


# Claims


def _claims(claims: Sequence[Doc]) -> str:
    rows = []
    for i, claim in enumerate(claims):
        models = claim["models"] or {"": {"missing": "not measured"}}
        for j, (model, entry) in enumerate(models.items()):
            first = j == 0
            rows.append(
                f"<tr{' class=new' if first else ''}><td>{escape(claim['text']) if first else ''}</td>"
                f"<td>{escape(claim['paper']) if first else ''}</td><td class=model>{escape(model)}</td>"
                f"<td>{_tag(i, model, entry)}</td><td>{_numbers(i, model, entry)}</td>"
                f'<td class="note">{escape(claim["holds_if"]) if first else ""}</td></tr>'
            )
    head = "".join(
        f"<th>{name}</th>" for name in ("claim", "in the paper", "model", "", "our figures", "yes if")
    )
    return (
        '<section id="claims"><h2>The paper’s claims on our models</h2>'
        '<p class="shows">Each is told from the JSON of its item; the last column has the rule for “yes”.</p>'
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
        f'<p class="note">{escape(BIASED)} Counts stand with each item.</p></section>'
    )


def _tag(i: int, model: str, entry: Doc) -> str:
    word = verdict_word(entry)
    at = escape(f"{i}/models/{model}")
    return f'<span class="tag {word if word in ("yes", "no") else ""}" data-verdict="{at}">{word}</span>'


def _numbers(i: int, model: str, entry: Doc) -> str:
    if "missing" in entry:
        reason = entry["missing"].partition(":")[0]  # the item itself says what to do
        return f'<span class="note">{escape(reason)}</span>'
    parts = [
        f"{escape(name)}: {_number(CLAIMS, f'{i}/models/{model}/numbers/{name}', value, NUMBER)}"
        for name, value in entry["numbers"].items()
    ]
    doubt = f' <span class="note">({escape(entry["doubt"])})</span>' if "doubt" in entry else ""
    return "; ".join(parts) + doubt


def _verdicts(item: Item, claims: Sequence[Doc]) -> str:
    """Where an item agrees with the paper and where not, in words."""
    lines = []
    for i, claim in enumerate(claims):
        if claim["item"] != item.name:
            continue
        for model, entry in claim["models"].items():
            word = verdict_word(entry)
            if word == "not measured":
                continue
            said = ("Holds on", "Does not hold on") if claim["ours"] else ("Agrees on", "Differs on")
            start = {"yes": said[0], "no": said[1]}.get(word, "Cannot be told on")
            lines.append(
                f'<li class="{word if word in ("yes", "no") else ""}">{start} <b>{escape(model)}</b>: '
                f"“{escape(claim['text'])}” {_numbers(i, model, entry)}; the paper: "
                f"{escape(claim['paper'])}.</li>"
            )
    return f'<ul class="verdicts">{"".join(lines)}</ul>' if lines else ""


# Items


def _section(item: Item, docs: Docs, claims: Sequence[Doc], folder: Path, public: bool) -> str:
    tables = item.tables(docs)
    ours = "".join(_table(table, docs, item.name) for table in tables)
    theirs = "".join(_table(table, docs, item.name) for table in item.theirs)
    if item.words:
        theirs += f"<h3>In the paper</h3><p>{escape(item.words)}</p>"
    wide = max((len(table.head) for table in tables), default=0) > 6
    return (
        f'<section id="{item.name}"><h2>{escape(item.title)}</h2>'
        f'<p class="shows">Paper: {escape(item.shows)}. {_counts(item.name, docs)}{_absent(item, docs)}</p>'
        f'<div class="pair{" wide" if wide else ""}"><div class="ours">{ours}</div>'
        f'<div class="theirs">{theirs}</div></div>{_verdicts(item, claims)}'
        f"{_pictures(docs, folder, public)}</section>"
    )


def _counts(item: str, docs: Docs) -> str:
    parts = []
    for model, doc in docs.items():
        if "data" in doc:
            path = f"{item}/{model}.json"
            named = [(k.replace("_", " "), f"counts/{k}", v) for k, v in doc["counts"].items()]
            named += [(f"seed of {k}", f"seeds/{k}", v) for k, v in doc["seeds"].items()]
            shown = ", ".join(f"{escape(n)} {_number(path, at, v, '{:,}')}" for n, at, v in named)
            said = f" (recorded by <code>{escape(doc['command'])}</code>)" if "record" in doc else ""
            parts.append(f"{escape(model)}{said}: {shown}")
    return f"Counts — {'; '.join(parts)}." if parts else ""


def _absent(item: Item, docs: Docs) -> str:
    scale = SCALES[next(iter(docs.values()))["scale"]]
    absent = [model for model in item.models(scale) if model not in docs]
    return f" Not measured: {escape(', '.join(absent))}." if absent else ""


def _table(table: Table, docs: Docs, item: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in table.head)
    rows = []
    for row in table.rows:
        lost = row[0] in docs and "missing" in docs[str(row[0])]
        if lost:
            cells = (
                f"<td>{escape(str(row[0]))}</td>"
                f'<td class="lost" colspan="{len(table.head) - 1}">{escape(str(row[1]))}</td>'
            )
        else:
            cells = "".join(f"<td>{_cell(cell, docs, item)}</td>" for cell in row)
        rows.append(f"<tr{' class=new' if row[0] else ''}>{cells}</tr>")
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}'
        f"</table></div>{note}"
    )


def _cell(cell: Cell, docs: Docs, item: str) -> str:
    parts: Iterable[str | Figure] = cell if isinstance(cell, tuple) else (cell,)
    return "".join(
        escape(part.replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"))
        if isinstance(part, str)
        else _number(f"{item}/{part.model}.json", f"data/{part.pointer}", part.value(docs), part.format)
        for part in parts
    )


def _number(path: str, at: str, value: object, form: str) -> str:
    return (
        f'<b data-json="{escape(path)}" data-at="{escape(at)}" data-format="{escape(form)}" '
        f'style="font-weight:inherit">{escape(write(value, form))}</b>'
    )


def _pictures(docs: Docs, folder: Path, public: bool) -> str:
    found = []
    for doc in docs.values():
        for picture in doc.get("pictures", ()):
            caption = escape(picture["caption"])
            file = folder / picture["file"]
            if picture["restricted"] and (public or not file.is_file()):
                why = "Not shown: the licence of the data forbids handing pictures on."
                found.append(f'<p class="note">{caption} {why}</p>')
                continue
            data = base64.b64encode(file.read_bytes()).decode()
            found.append(
                f'<figure><img alt="{caption}" data-sha256="{picture["sha256"]}" '
                f'src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
            )
    return "".join(found)
