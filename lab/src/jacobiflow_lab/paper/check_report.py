"""Compares a report with the JSON beside it: numbers, pictures and verdicts."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser
from pathlib import Path

from jacobiflow.core.files import read_text
from jacobiflow.core.records import parse_json
from jacobiflow_lab.paper.claims import verdict_word
from jacobiflow_lab.paper.schema import CLAIMS, Doc, find, write


class _Reader(HTMLParser):
    """Collects the numbers, verdicts and pictures of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.numbers: list[tuple[dict[str, str], str]] = []  # attributes, text
        self.verdicts: list[tuple[str, str]] = []  # pointer into the claims, word
        self.pictures: list[tuple[str, bytes]] = []  # digest that the page names, content
        self._open: dict[str, str] = {}
        self._text = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v or "" for k, v in attrs}
        if "data-json" in given or "data-verdict" in given:
            self._open, self._text = given, ""
        if tag == "img":
            self.pictures.append((given["data-sha256"], base64.b64decode(given["src"].partition(",")[2])))

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if "data-json" in self._open:
            self.numbers.append((self._open, self._text))
        elif "data-verdict" in self._open:
            self.verdicts.append((self._open["data-verdict"], self._text))
        self._open = {}


def pictures_of(page: Path) -> dict[str, bytes]:
    """The pictures inside a page by their digests; damaged ones are left out."""
    pictures = _Reader(page).pictures
    return {said: data for said, data in pictures if hashlib.sha256(data).hexdigest() == said}


def check(page: Path) -> tuple[int, int, list[str]]:
    """The number of numbers and pictures on a page, and what differs from the JSON beside it."""
    reader = _Reader(page)
    docs: dict[str, Doc] = {}
    wrong = []
    for given, text in reader.numbers:
        path, at = given["data-json"], given["data-at"]
        if path not in docs:
            docs[path] = parse_json(read_text(page.parent / path))
        if (said := write(find(docs[path], at), given["data-format"])) != text:
            wrong.append(f"{path} {at}: the page says {text}, the file {said}")
    claims = parse_json(read_text(page.parent / CLAIMS)) if reader.verdicts else []
    for at, word in reader.verdicts:
        if (said := verdict_word(find(claims, at))) != word:
            wrong.append(f"{CLAIMS} {at}: the page says {word}, the file {said}")
    known = {
        picture["sha256"]
        for file in page.parent.glob("*/*.json")
        for picture in parse_json(read_text(file)).get("pictures", ())
    }
    for said, data in reader.pictures:
        if hashlib.sha256(data).hexdigest() != said:
            wrong.append(f"a picture differs from its digest {said[:12]}")
        if said not in known:
            wrong.append(f"no JSON names the picture {said[:12]}")
    return len(reader.numbers), len(reader.pictures), wrong
