"""Converts our docstrings to Markdown for the API page.

Lines of the form `name: what it is` become a list, doctests become code blocks, and a comment after a field
becomes its description.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

FIELD = re.compile(r"^([a-z_]+(?:, [a-z_]+)*): (.+)")


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is shown."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Convert the docstring of an object; a field without one takes the comment on its line."""
        if obj.is_attribute and obj.docstring is None and len(obj.lines) == 1 and "#" in obj.lines[0]:
            obj.docstring = griffe.Docstring(obj.lines[0].partition("#")[2].strip(), parent=obj)
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    """The docstring with its lists and examples as Markdown."""
    out: list[str] = []
    inside = False  # a doctest
    for line in text.splitlines():
        if inside and not line.strip():
            out, inside = [*out, "```"], False
        elif line.startswith(">>>") and not inside:
            out, inside = [*out, "", "```pycon"], True
        found = None if inside else FIELD.match(line)
        if found:
            before = next((kept for kept in reversed(out) if not kept.startswith(" ")), "")
            out += [""] * (not before.startswith("- **"))
            line = f"- **{found[1]}**: {found[2]}"
        out.append(line)
    return "\n".join([*out, "```"] if inside else out)
