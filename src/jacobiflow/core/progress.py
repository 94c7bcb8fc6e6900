"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
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


class _Lines:
    """A file for tqdm that has no carriage returns."""

    def write(self, text: str) -> None:
        if text.strip():
            note(text.strip())

    def flush(self) -> None:
        """Every line is flushed."""


class _Bar(tqdm):  # type: ignore[type-arg]
    """A bar whose format has a {pace}."""

    @property
    def format_dict(self) -> dict[str, Any]:
        shown = dict(super().format_dict)
        done, seconds = shown["n"] - shown["initial"], shown["elapsed"]
        rate = shown["rate"] or (done / seconds if seconds else 0.0)
        return shown | {"pace": pace(rate, shown["unit"])}


def pace(rate: float, unit: str) -> str:
    """How fast work goes that has `rate` units per second.

    >>> pace(12.3, "step"), pace(0.7, "step"), pace(0.0, "step")
    ('12.3 steps per s', '1.43 s per step', '? s per step')
    """
    if rate >= 1:
        return f"{rate:.3g} {unit}s per s" if rate < 1000 else f"{rate:,.0f} {unit}s per s"
    return f"{1 / rate:.3g} s per {unit}" if rate else f"? s per {unit}"


def in_time(seconds: float) -> str:
    """A duration in two digits and its best unit.

    >>> [in_time(seconds) for seconds in (42.3, 1000, 9000, 200_000)]
    ['42 s', '17 min', '2.5 h', '56 h']
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    hours = seconds / 3600
    return f"{seconds / 60:.0f} min" if hours < 1.5 else f"{hours:.1f} h" if hours < 10 else f"{hours:,.0f} h"


def progress_bar(**options: Any) -> tqdm[Any]:
    """A tqdm bar with these options; without a terminal or notebook it prints a line every LINE_SECONDS.

    unit: one of what is counted, such as "step".
    """
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return _Bar(dynamic_ncols=True, bar_format=BAR, **options)
    options |= {"mininterval": LINE_SECONDS, "delay": LINE_SECONDS, "miniters": 1, "leave": False}
    return _Bar(file=_Lines(), bar_format=LINE, **options)


def with_estimate(show: Callable[[str], None]) -> Callable[[str], None]:
    """`show` for texts such as "block 2 of 8": adds the seconds left at the pace of the steps before."""
    counted, first, began = "", 0, 0.0

    def shown(text: str) -> None:
        nonlocal counted, first, began
        step = STEP.match(text)
        if step is not None and step[1] != counted:
            counted, first, began = step[1], int(step[2]), perf_counter()
        done = 0 if step is None else int(step[2]) - first
        if step is not None and done:
            left = (perf_counter() - began) / done * (int(step[3]) - int(step[2]) + 1)
            text += f", {left:.0f} s left" if left >= 1 else ""
        show(text)

    return shown


@contextmanager
def steps(verb: str) -> Iterator[Callable[[str], None]]:
    """A function that shows each step of the work and the time left.

    It writes in one place on a terminal, a line per step elsewhere. Steps differ before a colon.
    """
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
