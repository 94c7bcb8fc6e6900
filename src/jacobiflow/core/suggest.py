"""What to type instead: a name that was meant, a command that installs what is missing."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remark for an error message, with the most similar name; "" if none is similar.

    >>> did_you_mean("mnits", ["mnist", "cifar10"])
    ' (did you mean mnist?)'
    """
    close = get_close_matches(name[:100], list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def pip_install(*parts: str) -> str:
    """The command that installs parts of the project, which are on no index, from a checkout of it.

    >>> pip_install("models", "lab[app]")
    "pip install ./models './lab[app]' in the checkout"
    >>> pip_install("[data]")
    "pip install '.[data]' in the checkout"
    """
    paths = (f".{part}" if part.startswith("[") else f"./{part}" for part in parts)
    return f"pip install {shlex.join(paths)} in the checkout"
