"""What a release is checked for, and the files that people look for before they trust a package."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

import jacobiflow as jf

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / "docs/tools/release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_names_what_is_wrong(release: Any) -> None:
    head = "".join(f"{field}: x\n" for field in release.FIELDS)
    good = message_from_string(f"{head}Version: 1.0\n\nSee [it](https://example.org) and [below](#below).")
    assert release.problems("a", good, {"a.py"}, {"src/a.py"}, {"a.py"}, "## [1.0] - today") == []
    bad = message_from_string("Summary: x\nVersion: 1.1\n\n[README](README.md)")
    found = release.problems("a", bad, {"a.py", "c.py"}, {"lab/src/d.py"}, {"a.py", "b.py"}, "## [1.0] - today")
    assert "a: no License-Expression" in found
    assert "a: no Classifier" in found
    assert "a: the description has the link '](README.md)', which leads nowhere" in found
    assert "a: CHANGELOG.md has no heading ## [1.1]" in found
    assert found[-3:-1] == ["a: b.py is missing", "a: c.py is not of the repository"]
    assert found[-1] == "a: the source distribution contains lab/"


def test_one_version_everywhere(release: Any) -> None:
    for folder in release.PROJECTS.values():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert project["version"] == jf.__version__
    assert f"## [{jf.__version__}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["jacobiflow", "jacobiflow_lab", "jacobiflow_models"])
def test_a_distribution_can_be_found(release: Any, name: str) -> None:
    project = tomllib.loads((ROOT / release.PROJECTS[name] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "normalizing flows" in project["keywords"]
    assert "Intended Audience :: Science/Research" in project["classifiers"]
    assert project["description"]


def test_the_changelog_has_the_usual_form() -> None:
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# Changelog"
    kinds = {"### Added", "### Changed", "### Deprecated", "### Removed", "### Fixed", "### Security"}
    for line in lines:
        if line.startswith("## "):
            assert re.fullmatch(r"## \[\d+\.\d+\.\d+\]( - (unreleased|\d{4}-\d\d-\d\d))?", line), line
        elif line.startswith("### "):
            assert line in kinds


def test_the_citation_names_paper_and_software() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert (cited["cff-version"], cited["version"], cited["title"]) == ("1.2.0", jf.__version__, "jacobiflow")
    paper = cited["preferred-citation"]
    assert paper["title"].endswith("Normalizing Flows by Selective Jacobi Decoding")
    names = [author["family-names"] for author in paper["authors"]]
    assert (names, paper["year"]) == (["Zhang", "Lu", "Wu", "Wang", "Zhang"], 2026)


def test_reports_of_problems_ask_for_the_doctor() -> None:
    templates = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")]
    asked = {t["name"]: [f for f in t["body"] if "`jacobiflow doctor`" in f["attributes"]["label"]] for t in templates}
    assert all(asked.values())
    assert all(asked[name][0]["validations"]["required"] for name in ("Bug", "Slower than expected"))


def test_the_hook_before_commits_is_make_lint() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == ["make lint"]
