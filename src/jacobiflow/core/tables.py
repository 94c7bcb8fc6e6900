"""Text for people: tables that fit the terminal, counts, what to type instead."""

from __future__ import annotations

import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import partial
from itertools import accumulate, zip_longest

NUMBER = re.compile(r"(?=.*\d)(?!.*[^\W\d_]{2})")  # a cell of one number or more: at most a letter in a row
GAP = 2  # between columns

Rows = Sequence[Sequence[str]]


def table(rows: Rows) -> str:
    """Aligned columns of text that fit the terminal; the first row is the head.

    Where the terminal is narrow, the head and texts are folded, numbers never. Columns without room are in further
    tables below, each of which begins with the columns that tell the rows apart.
    """
    columns = list(zip(*rows, strict=True))
    least = [_least(column) for column in columns]
    if _total(least) <= terminal_width():
        return _drawn(columns)
    names: Iterator[str] = accumulate(columns[0], lambda above, name: name or above)  # one stands for rows below, too
    named = list(zip(names, *columns[1:], strict=True))
    keys = next((k for k in range(1, len(columns)) if len({row[:k] for row in named}) == len(rows)), 1)
    parts = [list(range(keys))]
    for i in range(keys, len(columns)):
        if len(parts[-1]) > keys and _total([least[j] for j in (*parts[-1], i)]) > terminal_width():
            parts.append(list(range(keys)))
        parts[-1].append(i)
    return "\n\n".join(_drawn([columns[i] for i in part]) for part in parts)


def _drawn(columns: Rows) -> str:
    widths = [max(map(len, column)) for column in columns]
    least = [_least(column) for column in columns]
    for fixed in ([max(_least(c), *map(len, c[1:]), 0) for c in columns], least):  # heads are folded before texts
        while _total(widths) > terminal_width():
            spare, i = max((w - f, i) for i, (w, f) in enumerate(zip(widths, fixed, strict=True)))
            if spare <= 0:
                break
            widths[i] = max(len(part) for cell in columns[i] for part in _folded(cell, widths[i] - 1))
    sides = [">" if i > 0 and any(map(NUMBER.match, column[1:])) else "<" for i, column in enumerate(columns)]
    lines, (head, *rows) = [], zip(*columns, strict=True)
    for row in (head, ["-" * width for width in widths], *rows):
        folded = [_folded(cell, width) for cell, width in zip(row, widths, strict=True)]
        for parts in zip_longest(*folded, fillvalue=""):
            cells = (f"{part:{side}{width}}" for part, side, width in zip(parts, sides, widths, strict=True))
            lines.append((" " * GAP).join(cells).rstrip())
    return "\n".join(lines)


def _least(column: Sequence[str]) -> int:
    """The smallest width of a column: that of the longest word or number."""
    parts = (cell if NUMBER.match(cell) else max(cell.split(), key=len, default="") for cell in column)
    return max(map(len, parts))


def _folded(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def terminal_width() -> int:
    """Columns of the terminal."""
    return shutil.get_terminal_size().columns


def counted(n: int, noun: str) -> str:
    """A number of things: "1 thread", "2,000 samples"."""
    return f"{n:,} {noun}" + "s" * (n != 1)


def shortened(text: str, width: int) -> str:
    """Text of at most this width, without its middle if it is longer."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[:half]}...{text[len(text) - half :]}"


def listing(rows: Iterable[tuple[str, str]]) -> str:
    """Names and descriptions in two columns that fit the terminal."""
    rows = list(rows)
    first = max((len(name) for name, _ in rows), default=0) + 4
    fill = partial(textwrap.fill, width=max(terminal_width(), first + 20), subsequent_indent=" " * first)
    return "\n".join(fill(text, initial_indent=f"  {name}".ljust(first)) for name, text in rows)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remark for an error message, with the most similar name; "" if none is similar."""
    close = get_close_matches(name[:100], list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def pip_install(*parts: str) -> str:
    """The command that installs parts, such as "models" or "[data]", from a checkout: they are on no index."""
    paths = (f".{part}" if part.startswith("[") else f"./{part}" for part in parts)
    return f"pip install {shlex.join(paths)} in the checkout"
