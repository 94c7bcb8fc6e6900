"""Typesets the formulas of the guide while it is built: as MathML, which browsers show without a script."""

from __future__ import annotations

import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_page_content(html: str, **_: Any) -> str:
    """A hook of mkdocs: the content of a page with its formulas typeset."""

    def typeset(found: re.Match[str]) -> str:
        return str(convert(unescape(found[2]), display="block" if found[1] == "div" else "inline"))

    return FORMULA.sub(typeset, html)
