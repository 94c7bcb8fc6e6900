"""Tables as data: `tables.toml` has those of each item, `layout` fills them for page, terminal and JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from string import Formatter
from typing import Any, Literal

from jacobiflow.core.records import build
from jacobiflow_lab.paper.paper_items import PAPER_ITEMS, PrintedTable, read_toml
from jacobiflow_lab.paper.schema import Docs, find, write

DASH = "–"
WIDE_TABLE_COLUMNS = 7
ARROWS = {"": "", "lower": " ↓", "higher": " ↑"}
FID_BIAS = "FID is biased upwards at small counts, equally only for equal counts; KID is unbiased."


@dataclass(frozen=True)
class Column:
    """A column: its heading, and the template of its cells.

    The fields of a template are places in the JSON of the row: "{seconds:.3f} ± {spread:.3f}". A place that
    starts with a slash begins at the top of the item's data. "#" is the index or key of the row. A column
    with `over`, the place of a list in the row, is repeated for each entry; "*" is the entry's index.
    """

    heading: str
    cell: str
    better: Literal["", "lower", "higher"] = ""
    empty: str = DASH  # shown where the JSON has no number
    over: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of our measurements: one row per entry of a list or dict of each model's data."""

    title: str = "Ours"
    section: str = ""  # of the page; default: the item's own
    detail: bool = False  # folded away on the page
    rows: str = ""  # the place of the rows; "": the data itself is the only row
    columns: tuple[Column, ...]
    footers: tuple[str, ...] = ()  # rows below those of a model: templates between "|", one per column
    note: str = ""
    paper: str = ""  # what the note adds beside the paper


@dataclass(frozen=True)
class Number:
    """A number of a cell: its value, its place in the data of a model, and its format."""

    model: str
    pointer: str
    format: str
    value: Any

    def __str__(self) -> str:
        return write(self.value, self.format)


Cell = list[str | Number]


@dataclass(frozen=True)
class Row:
    """A row of a laid out table. `missing` explains why the remaining cells are empty."""

    cells: list[Cell]
    first: bool = False  # of its model
    missing: str = ""

    def texts(self, width: int) -> list[str]:
        """The cells as plain text."""
        found = ["".join(map(str, cell)) for cell in self.cells]
        if self.missing:
            found.append(self.missing)
        return found + [""] * (width - len(found))


@dataclass(frozen=True)
class Grid:
    """A laid out table: what the page, the terminal and JSON show."""

    title: str
    head: list[str]
    rows: list[Row]
    note: str
    item: str = ""  # whose JSON the numbers come from
    detail: bool = False

    @property
    def wide(self) -> bool:
        """Whether it has too many columns to stand beside the paper's."""
        return len(self.head) >= WIDE_TABLE_COLUMNS

    def texts(self) -> list[list[str]]:
        """Heading and rows as plain text."""
        return [self.head, *(row.texts(len(self.head)) for row in self.rows)]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        head, *rows = self.texts()
        return {"title": self.title, "head": head, "rows": rows, "note": self.note}


def layout(table: Table | PrintedTable, docs: Docs, item: str = "") -> Grid:
    """The rows of a table from the JSON of each model; a model that was not measured says why.

    item: the name of the item that the JSON is of.
    """
    if isinstance(table, PrintedTable):
        before = ["", *(row[0] for row in table.rows)]
        rows = [Row([[c] for c in row], row[0] != old) for old, row in zip(before, table.rows, strict=False)]
        return Grid(table.title, list(table.head), rows, table.note)
    measured = {model: doc["data"] for model, doc in docs.items() if "data" in doc}
    columns = list(_repeated(table, measured.values()))
    rows = [row for model, data in measured.items() for row in _rows(table, columns, model, data)]
    rows += [Row([[model]], True, doc["missing"]) for model, doc in docs.items() if "missing" in doc]
    head = ["model", *(column.heading + ARROWS[column.better] for column in columns)]
    return Grid(table.title, head, rows, f"{table.note} {table.paper}".strip(), item, table.detail)


def _entries(data: Any, rows: str) -> list[tuple[str, Any]]:
    """Keys and entries of the list or dict at `rows`."""
    found = find(data, rows) if rows else {"": data}
    pairs = found.items() if isinstance(found, dict) else enumerate(found or ())
    return [(str(key), entry) for key, entry in pairs]


def _repeated(table: Table, measured: Iterable[Any]) -> Iterator[Column]:
    """The columns, those with `over` once per entry of the longest list."""
    entries = [entry for data in measured for _, entry in _entries(data, table.rows)]
    for column in table.columns:
        if not column.over:
            yield column
            continue
        most = max((len(find(entry, column.over) or ()) for entry in entries), default=1)
        for i in range(most):
            heading, cell = column.heading.replace("*", str(i + 1)), column.cell.replace("*", str(i))
            yield replace(column, heading=heading, cell=cell)


def _rows(table: Table, columns: list[Column], model: str, data: Any) -> Iterator[Row]:
    name, entries = model, _entries(data, table.rows)
    for key, entry in entries:
        missing = entry.get("missing", "")
        shown = columns[:1] if missing else columns
        base = f"{table.rows}/{key}" if table.rows else ""
        cells = [_cell(column.cell, column.empty, model, data, base, key) for column in shown]
        yield Row([[name], *cells], bool(name), missing)
        name = ""
    for footer in table.footers if entries else ():
        yield Row([[""], *(_cell(cell.strip(), DASH, model, data, "", "") for cell in footer.split("|"))])


def _cell(template: str, empty: str, model: str, data: Mapping[str, Any], base: str, key: str) -> Cell:
    """A filled template; `empty` where a number is None. A spread of zero, that of one run, is left out."""
    cell: Cell = []
    for text, field, spec, _ in Formatter().parse(template):
        if field is None or field == "#":
            label = str(int(key) + 1) if key.isdigit() else key
            cell += [text, label if field else ""]
            continue
        place = field.replace("#", key)
        pointer = place[1:] if place.startswith("/") else f"{base}/{place}".lstrip("/")
        value = find(data, pointer)
        if "±" in text and not value:
            break
        if value is None and empty != DASH:
            return [empty]
        cell += [text, Number(model, pointer, f"{{:{spec}}}" if spec else "{}", value)]
        if value is None:
            return cell[-1:]
    return [part for part in cell if part != ""]


TABLES = {
    item: tuple(build(Table, fields, item) for fields in entries) for item, entries in read_toml("tables.toml").items()
}


def sections(item: str) -> tuple[str, ...]:
    """The sections of the page that show an item: names of PAPER_ITEMS."""
    return tuple(dict.fromkeys(table.section or item for table in TABLES[item]))


def shows(item: str) -> str:
    """The tables and figures of the paper that an item stands beside."""
    return "; ".join(PAPER_ITEMS[name].shows for name in sections(item))
