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


PAGES = ("index", "how-it-works", "performance", "regimes", "playground", "architecture")  # those with figures


def test_search_mathematics_and_figures_work_from_the_disk(tmp_path: Path) -> None:
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
        assert "_t" not in page.locator("article").inner_text()
        for width, least, most in ((1280, 580, 780), (390, 690, 710)):
            page.set_viewport_size({"width": width, "height": 900})
            for name in PAGES:
                page.goto(f"file://{tmp_path}/{name}.html")
                figures = page.locator("article p > img").all()
                assert figures
                widths = [figure.bounding_box()["width"] for figure in figures]
                assert least < min(widths) <= max(widths) < most  # their text can be read
                assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
        assert away == []
        browser.close()
