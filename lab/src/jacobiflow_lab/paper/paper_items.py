"""What the paper shows, section by section of the report, read from `paper_items.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jacobiflow.core.records import build


@dataclass(frozen=True, kw_only=True)
class PrintedTable:
    """A table with numbers that the paper prints."""

    title: str
    head: list[str]
    rows: list[list[str]]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PaperItem:
    """The paper's side of a section."""

    title: str
    shows: str  # which table or figure
    words: str = ""  # what it shows, where it is a picture
    tables: tuple[PrintedTable, ...] = ()


def read_toml(name: str) -> dict[str, Any]:
    """A data file of this package."""
    return tomllib.loads((files("jacobiflow_lab.paper") / name).read_text(encoding="utf-8"))


# By the name of the section.
PAPER_ITEMS = {name: build(PaperItem, fields, name) for name, fields in read_toml("paper_items.toml").items()}
