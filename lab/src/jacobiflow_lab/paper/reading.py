"""Reads a report again: its numbers, pictures and verdicts against the JSON beside it."""

from __future__ import annotations

import base64
import hashlib
from html.parser import HTMLParser
from pathlib import Path

from jacobiflow.core.records import parse_json, read_text
from jacobiflow_lab.paper.claims import verdict_word
from jacobiflow_lab.paper.item import Doc, find, write
from jacobiflow_lab.paper.report import CLAIMS


class _Reader(HTMLParser):
    """Numbers and pictures of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[tuple[str, str, str, str]] = []  # file, pointer, format, text
        self.pictures: list[tuple[str, bytes]] = []  # digest that the page names, what it shows
        self.verdicts: list[tuple[str, str]] = []  # pointer into the claims, word
        self._open: list[str] | None = None
        self._text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {k: v or "" for k, v in attrs}
        if tag == "b" and "data-json" in given:
            self._open, self._text = [given["data-json"], given["data-at"], given["data-format"]], ""
        if "data-verdict" in given:
            self._open, self._text = [given["data-verdict"]], ""
        if tag == "img":
            data = base64.b64decode(given["src"].partition(",")[2])
            self.pictures.append((given["data-sha256"], data))

    def handle_data(self, data: str) -> None:
        self._text += data

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("b", "span") or self._open is None:
            return
        if len(self._open) == 1:
            self.verdicts.append((self._open[0], self._text))
        else:
            path, at, form = self._open
            self.numbers.append((path, at, form, self._text))
        self._open = None


def pictures_of(page: Path) -> dict[str, bytes]:
    """The pictures inside a page by their digests; those that are not what they should be are left out."""
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return {said: data for said, data in reader.pictures if hashlib.sha256(data).hexdigest() == said}


def check(page: Path) -> tuple[int, int, list[str]]:
    """How many numbers and pictures a page has, and what in it is not what the JSON beside it says."""
    reader = _Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    docs: dict[str, Doc] = {}
    wrong = []
    for path, at, form, text in reader.numbers:
        if path not in docs:
            docs[path] = parse_json(read_text(page.parent / path))
        if (said := write(find(docs[path], at), form)) != text:
            wrong.append(f"{path} {at}: the page says {text}, the file {said}")
    claims = parse_json(read_text(page.parent / CLAIMS)) if reader.verdicts else []
    for at, word in reader.verdicts:
        entry = find(claims, at)
        if (said := "not measured" if entry is None else verdict_word(entry)) != word:
            wrong.append(f"{CLAIMS} {at}: the page says {word}, the file {said}")
    known = {
        picture["sha256"]
        for file in page.parent.glob("*/*.json")
        for picture in parse_json(read_text(file)).get("pictures", ())
    }
    wrong += [
        f"a picture is not the {said[:12]} that it should be"
        for said, data in reader.pictures
        if hashlib.sha256(data).hexdigest() != said
    ]
    wrong += [f"no JSON knows the picture {said[:12]}" for said, _ in reader.pictures if said not in known]
    return len(reader.numbers), len(reader.pictures), wrong
