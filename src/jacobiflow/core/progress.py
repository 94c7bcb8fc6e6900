"""Progress: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LINE_SECONDS = 30.0  # between lines where there is no terminal
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
