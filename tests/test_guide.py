"""The guide as people open it: from the disk, without a network. Needs Chromium, which `.ci/run` installs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ROOT = Path(__file__).parent.parent
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium"),
]


def test_search_and_mathematics_work_from_the_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        away: list[str] = []
        page.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else away.append(r.url))
        page.goto(f"file://{tmp_path}/index.html")
        page.click("input[name=query]")
        page.keyboard.type("frontier")
        found = page.locator(".md-search-result__link").first
        found.wait_for(timeout=60_000)
        assert "glossary.html" in (found.get_attribute("href") or "")
        page.goto(f"file://{tmp_path}/how-it-works.html")
        formula = page.locator("math[display=block]").first
        assert formula.bounding_box()["height"] > 10
        assert "θ" in formula.text_content()
        assert "\\theta" not in page.content()
        assert away == []
        browser.close()
