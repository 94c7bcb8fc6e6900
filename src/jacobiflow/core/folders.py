"""Where things are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$JACOBIFLOW_CACHE, else `jacobiflow` in $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("JACOBIFLOW_CACHE")
    shared = os.environ.get("XDG_CACHE_HOME")
    return Path(own) if own else Path(shared or Path.home() / ".cache") / "jacobiflow"
