"""Warnings that name the caller's line."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1]) + os.sep


def warn_caller(text: str) -> None:
    """A RuntimeWarning at the first line outside this package, however deep inside it we are."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
