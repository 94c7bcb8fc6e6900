"""What a mistyped name may have meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A remark for an error message, with the most similar name; "" if none is similar.

    >>> did_you_mean("mnits", ["mnist", "cifar10"])
    ' (did you mean mnist?)'
    """
    close = get_close_matches(name[:100], list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""
