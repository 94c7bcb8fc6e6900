"""Tables of text, for terminals and for `repr`."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns of text; the first row is the head, all columns but the first are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in (rows[0], ["-" * width for width in widths], *rows[1:]):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def terminal_width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size().columns


def listing(rows: Iterable[tuple[str, str]]) -> str:
    """Names and descriptions in two columns that fit the terminal."""
    rows = list(rows)
    first = max((len(name) for name, _ in rows), default=0) + 4
    width = max(terminal_width(), first + 20)
    indents = ((f"  {name}".ljust(first), text) for name, text in rows)
    return "\n".join(
        textwrap.fill(text, width, initial_indent=indent, subsequent_indent=" " * first) for indent, text in indents
    )
