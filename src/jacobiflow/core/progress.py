"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from io import TextIOBase
from time import perf_counter
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 30.0  # between lines where there is no terminal
STEP = re.compile(r"(.*?)(\d+) of (?:at most )?(\d+)")
LINE = "{n_fmt} of {total_fmt} {unit}s, {pace}, {remaining} left{postfix}"
BAR = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {pace}{postfix}]"


def note(text: str) -> None:
    """A line about progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


class _Lines(TextIOBase):
    """A file for tqdm that has no carriage returns."""

    def write(self, text: str) -> int:
        if text.strip():
            note(text.strip())
        return len(text)


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar whose format has a {pace}."""

    @property
    def format_dict(self) -> dict[str, Any]:
        shown = dict(super().format_dict)
        mean = (shown["n"] - shown["initial"]) / (shown["elapsed"] or math.inf)
        return shown | {"pace": pace(shown["rate"] or mean, shown["unit"])}


def pace(rate: float, unit: str) -> str:
    """`rate` units per second in words, such as "12.3 steps per s" or "1.43 s per step"."""
    if rate >= 1:
        return f"{rate:.3g} {unit}s per s" if rate < 1000 else f"{rate:,.0f} {unit}s per s"
    return f"{1 / rate:.3g} s per {unit}" if rate else f"? s per {unit}"


def in_time(seconds: float) -> str:
    """A duration in two digits and its best unit: "42 s", "17 min", "2.5 h", "56 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    return f"{seconds / 60:.0f} min" if hours < 1.5 else f"{hours:.1f} h" if hours < 10 else f"{hours:,.0f} h"


def progress_bar(**options: Any) -> tqdm[Any]:
    """A tqdm bar, its `unit` in the singular; without a terminal or notebook it is a line every LINE_SECONDS."""
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return _Bar(dynamic_ncols=True, bar_format=BAR, **options)
    options |= {"mininterval": LINE_SECONDS, "delay": LINE_SECONDS, "miniters": 1, "leave": False}
    return _Bar(file=_Lines(), bar_format=LINE, **options)


def with_estimate(show: Callable[[str], None]) -> Callable[[str], None]:
    """`show` for texts such as "block 2 of 8": adds the seconds left at the pace of the steps before."""
    counted, first, began = "", 0, 0.0

    def shown(text: str) -> None:
        nonlocal counted, first, began
        if step := STEP.match(text):
            kind, now, last = step[1], int(step[2]), int(step[3])
            if kind != counted:
                counted, first, began = kind, now, perf_counter()
            left = (perf_counter() - began) / max(now - first, 1) * (last - now + 1)
            text += f", {left:.0f} s left" if left >= 1 and now > first else ""
        show(text)

    return shown


@contextmanager
def steps(verb: str) -> Iterator[Callable[[str], None]]:
    """A function that shows each step and the time left; texts that are equal up to a colon are one step."""
    last = ""
    with tqdm(bar_format="{desc} [{elapsed}]", leave=False, disable=None) as bar:

        def show(step: str) -> None:
            nonlocal last
            if bar.disable and step.partition(":")[0] != last:
                note(f"{verb} {step}")
            last = step.partition(":")[0]
            bar.set_description_str(f"{verb} {step}")

        yield with_estimate(show)


@cache
def announce(text: str) -> None:
    """Say on a terminal what is going to take a while, once per process."""
    if sys.stderr.isatty():
        note(text)
