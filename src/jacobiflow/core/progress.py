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
LINE = "{n_fmt} of {total_fmt}{unit}, {rate_fmt}, {remaining} left{postfix}"


class _Lines:
    """A file for tqdm that has no carriage returns."""

    def write(self, text: str) -> None:
        if text.strip():
            print(text.strip(), file=sys.stderr, flush=True)

    def flush(self) -> None:
        """Every line is flushed."""


def progress_bar(**options: Any) -> tqdm[Any]:
    """A tqdm bar with these options; without a terminal or notebook it prints a line every LINE_SECONDS."""
    if sys.stderr.isatty() or "ipykernel" in sys.modules:
        return tqdm(dynamic_ncols=True, **options)
    options |= {"mininterval": LINE_SECONDS, "delay": LINE_SECONDS, "miniters": 1, "leave": False}
    return tqdm(file=_Lines(), bar_format=LINE, **options)


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
                print(f"{verb} {step}", file=sys.stderr, flush=True)
            last = step.partition(":")[0]
            bar.set_description_str(f"{verb} {step}")

        yield with_estimate(show)


@cache
def announce(text: str) -> None:
    """Say on a terminal what is going to take a while, once per process."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
