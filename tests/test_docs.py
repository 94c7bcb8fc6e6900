"""What README and the guide show runs as written.

A page is played in a folder of its own, its blocks in order: `python` blocks share one namespace, `bash`
blocks are run by bash, and a block whose title is the name of a file becomes that file. Commands that set up
an environment (make, pip, activate) are not run inside the tests that they run: their targets and extras are
looked up. Lines of torchrun, and blocks with the title "needs ...", ask for what is not here (8 GPUs, an
hour): the program reads their options, no more. Files that a user would have are made small, under the names
that the pages give them.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jacobiflow as jf
from commands import PROGRAM, lines, read
from jacobiflow.cli.main import COMMANDS
from public_tarflow import Shape, public

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = ("text", "json")  # only to be looked at
SETUP = ("make", "pip", ".", "git")
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Code:
    """A fenced block."""

    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Code]:
    found = []
    for info, text in FENCE.findall(page.read_text(encoding="utf-8")):
        match = re.fullmatch(r'(\w+)(?: title="([^"]*)")?', info)
        assert match, f"{page.name}: a block says its language, and maybe a title, not {info!r}"
        found.append(Code(match[1], match[2] or "", text))
    return found


# Files that a user would have


def mnist(path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, n in (("train", 64), ("test", 16)):
        labels = draw.integers(0, 10, n)
        images = np.zeros((n, 28, 28), np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4:24, 4 + label : 8 + label] = draw.integers(128, 256, (20, 4))
        arrays |= {f"x_{part}": images, f"y_{part}": labels}
    np.savez_compressed(path, **arrays)


def checkpoint(path: Path) -> None:
    shape = Shape(width=128, patch=4, size=28, channels=1, blocks=4, layers=4, classes=10)
    state = public(shape, dtype=torch.float32)
    torch.save({key: 0.1 * value if "proj_out" in key else value for key, value in state.items()}, path)


STAND_INS = {"mnist.npz": mnist, "mnist_model_4_128_4_4_0.1.pth": checkpoint}


# Pages


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_a_page_runs_as_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = blocks(page)
    text = "".join(block.text for block in found)
    monkeypatch.chdir(tmp_path)
    for name, make in STAND_INS.items():
        if name in text:
            make(tmp_path / name)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in found:
        if block.title.startswith("needs "):
            for line in lines(block.text):
                look_up(line) if is_setup(line) else read(line)
        elif block.language == "bash":
            run_commands(block.text, tmp_path)
        elif block.language == "python":
            exec(compile(block.text, f"{page.name} in {block.text[:40]!r}", "exec"), namespace)
        elif "." in block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        else:
            assert block.language in SHOWN, f"{page.name}: {block.language} is neither run nor shown"


def run_commands(text: str, folder: Path) -> None:
    """A block of commands; what sets up an environment is looked up instead."""
    kept = []
    for line in lines(text):
        if is_setup(line):
            look_up(line)
        elif line.startswith("torchrun "):
            read(line)
        else:
            kept.append(line)
    env = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    script = "\n".join(["set -euo pipefail", *kept])
    ran = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert ran.returncode == 0, f"{script}\n{ran.stdout}\n{ran.stderr}"
    assert "Traceback" not in ran.stderr
    assert "warning" not in ran.stderr.lower(), ran.stderr


def is_setup(line: str) -> bool:
    return line.split()[0] in SETUP and not line.startswith(". ./")


def look_up(line: str) -> None:
    """A command that sets something up: what it names is there."""
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        made = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(targets) <= set(made), line
    if words[:2] == ["pip", "install"]:
        for name, extras in re.findall(r"(\.|jacobiflow|jacobiflow-lab|\./lab)\[(.*?)\]", line):
            folder = ROOT / "lab" if name.endswith("lab") else ROOT
            known = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            assert set(extras.split(",")) <= set(known["optional-dependencies"]), line


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_inside_sentences_are_ones_that_there_are(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for span in re.findall(r"`([^`]+)`", text):
        line = " ".join(span.split())
        if line.startswith(("make ", "pip ")):
            look_up(line)
        elif line.startswith("python ") and ".py" in line:
            assert (ROOT / line.split()[1]).is_file(), line
        elif match := PROGRAM.search(line):
            if re.search(r"\b[A-Z]{3,}\b|\.\.\.", line):  # with a placeholder
                assert match[1].split()[0] in (*COMMANDS, "COMMAND"), line
            elif match[1] not in COMMANDS:
                read(line)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert link.startswith(("https://", "http://")) or (page.parent / link).exists(), link


def test_most_pages_have_blocks_that_are_run() -> None:
    counts = {
        str(page.relative_to(ROOT)): sum(b.language in ("python", "bash") for b in blocks(page)) for page in PAGES
    }
    assert counts["README.md"] >= 5
    assert sum(n > 1 for n in counts.values()) >= 5


def head(page: str) -> str:
    """What stands before the first section, as one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").partition("\n## ")[0].split())


def test_the_first_screen_of_readme_says_what_one_needs() -> None:
    first = head("README.md")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"It needs Python {project['requires-python'].removeprefix('>=')} or newer." in first
    assert "A C compiler helps" in first
    assert "The **plain loop** is sequential decoding as the public TarFlow code does it" in first


def test_the_landing_page_says_who_should_use_this_for_what() -> None:
    text = head("docs/index.md")
    assert "| you have | you want | use |" in text
    for use in ("flow.sample", "jf.accelerate", "jacobiflow reproduce", "jacobiflow train", "jacobiflow app"):
        assert use in text
    assert "It does not help with" in text
    assert len(text) < 2000  # one screen


def test_a_page_says_what_stays_as_it_is() -> None:
    text = (ROOT / "docs/stability.md").read_text(encoding="utf-8")
    for section in ("## What is public", "## How names are deprecated", "`DeprecationWarning`", '"Removed"'):
        assert section in text
    assert f"at version {jf.__version__.rpartition('.')[0]}:" in text


# The guide


@pytest.mark.slow
def test_the_guide_builds_without_a_warning(tmp_path: Path) -> None:
    command = ["make", "-s", "-o", ".venv/dev", "docs", f"ARGS=--site-dir {tmp_path / 'site'}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert "WARNING" not in ran.stderr
    for page in (ROOT / "docs").glob("*.md"):
        html = (tmp_path / "site" / f"{page.stem}.html").read_text(encoding="utf-8")
        outside = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="((?:https?:)?//[^"]*)"', html)
        assert outside == [], "the guide reads without a network"
    api = (tmp_path / "site" / "api.html").read_text(encoding="utf-8")
    missing = [name for name in jf.__all__ if f'id="jacobiflow.{name}"' not in api]
    assert missing == []


@pytest.mark.slow
def test_the_import_graph_shows_the_layers_that_there_are(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs/tools/graph.py", tmp_path], check=True)
    made, kept = ((folder / "imports.svg").read_text() for folder in (tmp_path, ROOT / "docs" / "images"))

    layers = {path.parent.name for path in (ROOT / "src" / "jacobiflow").glob("*/__init__.py")}

    def shown(svg: str) -> set[str]:
        return layers & set(re.findall(r"<!-- (.*?) -->", svg))

    assert shown(made) == layers
    assert shown(kept) == layers, "run `make pictures`"


# Examples

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_an_example_runs(script: Path, tmp_path: Path) -> None:
    (usage,) = re.findall(r"^ *(python examples/.*)$", script.read_text(encoding="utf-8"), re.MULTILINE)
    _, path, *args = shlex.split(usage)
    for name, make in STAND_INS.items():
        if name in args:
            make(tmp_path / name)
    ran = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:__main__", ROOT / path, *args],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_there_are_five_examples() -> None:
    assert {path.stem for path in EXAMPLES} >= {
        *("sample", "tune", "accelerate_sbi", "differentiate", "convert_tarflow"),
    }
