"""What the paper shows, item by item, read from `paper_items.md`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, kw_only=True)
class PrintedTable:
    """A table with numbers that the paper prints."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PaperItem:
    """The paper's side of an item."""

    title: str
    shows: str  # which table or figure
    words: str  # what it shows, where it is a picture
    tables: tuple[PrintedTable, ...]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _table(text: str) -> PrintedTable:
    """A table of the file: its title, its rows, and perhaps a note."""
    title, *lines = text.strip().splitlines()
    head, _, *rows = [_cells(line) for line in lines if line.startswith("|")]
    note = " ".join(line for line in lines if not line.startswith("|"))
    return PrintedTable(title=title, head=head, rows=rows, note=note.strip())


def _read() -> dict[str, PaperItem]:
    text = (files("jacobiflow_lab.paper") / "paper_items.md").read_text(encoding="utf-8")
    found = {}
    for section in re.split(r"^## ", text, flags=re.M)[1:]:
        about, *tables = re.split(r"^### ", section, flags=re.M)
        heading, _, words = about.partition("\n")
        name, title, shows = re.findall(r"(\S+): (.+) \((.+)\)", heading)[0]
        printed = tuple(_table(table) for table in tables)
        found[name] = PaperItem(title=title, shows=shows, words=" ".join(words.split()), tables=printed)
    return found


PAPER_ITEMS = _read()  # by the name of the item
