"""What several commands share: parsing, devices, tables."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import tyro

T = TypeVar("T")


def parse(kind: type[T], args: Sequence[str], *, command: str, default: T | None = None) -> T:
    """The options of one command; a mistake ends with usage and status 2."""
    extra: dict[str, Any] = {} if default is None else {"default": default}
    found: T = tyro.cli(
        kind,
        args=list(args),
        prog=f"jacobiflow {command}",
        description=inspect.cleandoc(kind.__doc__ or ""),
        config=(tyro.conf.AvoidSubcommands,),
        **extra,
    )
    return found


def parse_labels(text: str | None, n: int, classes: int) -> torch.Tensor | None:
    """Labels of n samples from "3", "0-9" or "0,2,5-7", in turn; None and "none" are no labels.

    >>> parse_labels("0-2,7", 6, 10).tolist()
    [0, 1, 2, 7, 0, 1]
    """
    if text is None or text == "none":
        return None
    if not classes:
        raise ValueError("this model takes no labels: leave --labels out")
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or len(first + last) > 9:
            raise ValueError(f"--labels takes numbers and ranges such as 0-9 or 1,3,5-7, not {text!r}")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high >= classes:
            raise ValueError(f"--labels {part.strip()} is outside 0-{classes - 1}")
        found += range(low, high + 1)
    return torch.tensor(found)[torch.arange(n) % len(found)]


def pick_device(name: str) -> torch.device:
    """A device by name; "auto" is CUDA where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"--device must be auto, cpu, cuda, cuda:1 or the like, not {name!r}") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: this torch sees no CUDA device")
    return device


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
    print(json.dumps(doc, indent=2) if as_json else text)


def note(text: str) -> None:
    """A line about progress, on standard error."""
    print(text, file=sys.stderr, flush=True)
