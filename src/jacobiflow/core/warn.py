"""Warnings that appear once, or at the caller's line."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

PACKAGE = str(Path(__file__).parents[1]) + os.sep

_warned: set[str] = set()


def warn_once(text: str, about: str = "") -> None:
    """Warn, unless this process has already given the same warning, or one about the same thing."""
    if (about or text) not in _warned:
        _warned.add(about or text)
        warnings.warn(text, stacklevel=3)


def warn_caller(text: str) -> None:
    """Give a RuntimeWarning at the innermost line outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)
