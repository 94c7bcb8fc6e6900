"""What several commands share: parsing, devices, tables."""

from __future__ import annotations

import inspect
import io
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, TypeVar

import torch
import tyro

from jacobiflow.flows.flow import Flow

T = TypeVar("T")


def parse(kind: type[T], args: Sequence[str], *, command: str, default: T | None = None) -> T:
    """The options of one command; a mistake is a ValueError of one line, --help ends the program."""
    extra: dict[str, Any] = {} if default is None else {"default": default}
    marks: list[Any] = [tyro.conf.AvoidSubcommands]
    if default is None:  # what is off needs no flag that says so; what a recipe says may be either
        marks.append(tyro.conf.FlagCreatePairsOff)
    out, err = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            found: T = tyro.cli(
                kind,
                args=list(args),
                prog=f"jacobiflow {command}",
                description=inspect.cleandoc(kind.__doc__ or ""),
                config=marks,
                **extra,
            )
    except SystemExit as stop:
        if stop.code:
            raise ValueError(f"{_flat(err.getvalue())}; see jacobiflow {command} --help") from None
        out.seek(0)
        text = "\n".join(_wrap(line.rstrip()) for line in out.read().splitlines())
        print(re.sub(r"\n{3,}", "\n\n", text))
        raise
    return found


def _flat(box: str) -> str:
    """What a parser's error box says between its title and its next rule, in one line."""
    lines = [line.strip(" │") for line in box.splitlines()[1:]]
    text = takewhile(lambda line: line.strip("-─"), dropwhile(lambda line: not line.strip("-─"), lines))
    words = " ".join(text).split()
    return " ".join(words).removesuffix(".") or "the options cannot be read"


def _wrap(line: str) -> str:
    """A line of plain text in lines that fit the terminal."""
    width = shutil.get_terminal_size().columns
    if len(line) <= width:
        return line
    whole = re.sub(r"\[[^]]*\]", lambda m: m[0].replace(" ", "\xa0"), line)  # [--option VALUE]
    indent = "  " if line.startswith("usage:") else ""
    return textwrap.fill(whole, width, subsequent_indent=indent, break_on_hyphens=False).replace("\xa0", " ")


def listing(rows: Iterable[tuple[str, str]]) -> str:
    """Names and what they are, in two columns that fit the terminal."""
    rows = list(rows)
    width = shutil.get_terminal_size().columns
    first = max((len(name) for name, _ in rows), default=0) + 4
    return "\n".join(
        textwrap.fill(
            text,
            max(width, first + 20),
            initial_indent=f"  {name}".ljust(first),
            subsequent_indent=" " * first,
        )
        for name, text in rows
    )


def parse_labels(text: str | None, n: int, classes: int) -> torch.Tensor | None:
    """Labels of n samples from "3", "0-9" or "0,2,5-7", in turn; None and "none" are no labels.

    >>> parse_labels("0-2,7", 6, 10).tolist()
    [0, 1, 2, 7, 0, 1]
    """
    cycle = label_cycle(text, classes)
    return torch.tensor(cycle)[torch.arange(n) % len(cycle)] if cycle else None


def label_cycle(text: str | None, classes: int) -> tuple[int, ...]:
    """The labels that samples take in turn; () is none."""
    if text is None or text == "none":
        return ()
    if not classes:
        raise ValueError("this model takes no labels: leave --labels out")
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(x.isascii() and x.isdigit() and len(x) < 10 for x in numbers):
            raise ValueError(f"--labels takes numbers and ranges such as 0-9 or 1,3,5-7, not {text!r}")
        low, high = int(numbers[0]), int(numbers[-1])
        if high < low or high >= classes:
            raise ValueError(f"--labels {part.strip()} is outside 0-{classes - 1}")
        found += range(low, high + 1)
    return tuple(found)


def pick_device(name: str) -> torch.device:
    """A device by name, proved by using it; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu, cuda, cuda:1 or the like, not {name!r}") from None
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError):  # which of them, differs between kinds of devices
        raise ValueError(f"--device {name}: this torch sees no such device") from None
    return device


def make_folder(path: Path) -> None:
    """The folder `path`, ready to be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {path} cannot be made: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(f"--out {path} cannot be written to")


def refuse_context(flow: Flow, instead: str) -> None:
    """Flows that need context are for Python."""
    if flow.context_features:
        raise ValueError(
            f"this flow needs context, which the command line cannot give; use {instead} in Python"
        )


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as text in aligned columns; the first row is the head, numbers stand right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for j, row in enumerate(rows):
        cells = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
        if j == 0:
            lines.append("  ".join("-" * w for w in widths))
    return "\n".join(lines)


def report(doc: dict[str, Any], text: str, *, as_json: bool) -> None:
    """To standard output: `text` for people or `doc` for programs."""
    print(json.dumps(doc, indent=2, allow_nan=False) if as_json else text)


def note(text: str) -> None:
    """A line about progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
