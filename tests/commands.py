"""Command lines as documents show them: split into words, and read by the program without being run."""

from __future__ import annotations

import re
import shlex
from typing import Any
from unittest import mock

import tyro

from jacobiflow.cli.main import COMMANDS, find

PROGRAM = re.compile(r"(?:^(?:\S*/)?jacobiflow|-m jacobiflow\.cli\.main)\s+(.*)", re.DOTALL)


class Read(BaseException):
    """The options were read; the command goes no further."""


def lines(text: str) -> list[str]:
    """The commands of a block: comments go, lines that end in a backslash are joined."""
    joined = re.sub(r"\\\n\s*", " ", text)
    kept = (line.strip() for line in joined.splitlines())
    return [line for line in kept if line and not line.startswith("#")]


def read(line: str) -> None:
    """Have the program read the options of a line that starts it; raises if it does not take them."""
    found = PROGRAM.search(line)
    assert found, f"this does not start jacobiflow: {line}"
    name, *rest = shlex.split(found[1], comments=True)
    if name in ("--help", "--version", "--completion"):
        return
    assert name in COMMANDS, f"no command {name!r}: {line}"
    if "--help" in rest or (name == "train" and not rest):
        return
    if rest[:1] == ["--images"]:  # the images need not exist: other options are those of any TarFlow
        rest[:2] = ["mnist"]
    original = tyro.cli

    def cli(*args: Any, **options: Any) -> Any:
        original(*args, **options)
        raise Read

    with mock.patch.object(tyro, "cli", cli):
        try:
            find(name).main(rest)
        except Read:
            return
    raise AssertionError(f"the program ended before it had read its options: {line}")
