"""The playground in a browser: what visitors see and do. Needs Chromium, which `.ci/run` installs."""

from __future__ import annotations

import base64
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import jacobiflow as jf
from jacobiflow_lab.app import views
from jacobiflow_lab.app.models import TEXTS

pytest.importorskip("gradio")
api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the path: apt-get install chromium"),
]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PATIENCE = 60_000  # milliseconds, for machines that are busy


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page, served by the command itself."""
    cache = tmp_path_factory.mktemp("cache")
    env = os.environ | {"JACOBIFLOW_CACHE": str(cache), "GRADIO_TEMP_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "jacobiflow.cli.main", "app", "--model", "mnist-small", "--port", "0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
            assert found is not None, "the server did not start"
            yield found[0]
        finally:
            server.terminate()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


class Visitor:
    """Somebody with a browser of their own."""

    def __init__(self, browser: Any, address: str, *, width: int = 1280, theme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900})
        self.context.set_default_timeout(PATIENCE)
        self.page = self.context.new_page()
        self.away: list[str] = []  # requests to other machines
        self.rejected: list[str] = []  # requests that the gate or gradio answered with an error
        self.page.on("request", lambda request: self.note(request.url, address))
        self.page.on("response", lambda r: self.rejected.append(r.url) if r.status >= 400 else None)
        self.page.goto(f"{address}/?__theme={theme}")
        self.page.wait_for_selector("#go")

    def note(self, url: str, address: str) -> None:
        if not url.startswith((address, "data:", "blob:")):
            self.away.append(url)

    def __enter__(self) -> Visitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()

    def ask(self, **numbers: object) -> None:
        for name, value in numbers.items():
            self.page.fill(f"#{name} input", str(value))

    def press(self, button: str) -> None:
        self.page.click(f"#{button}")

    def picture(self, name: str) -> str:
        """The address of a picture, which is all of the picture."""
        return str(self.page.locator(f"#{name} img").get_attribute("src"))

    def pixels(self, name: str) -> np.ndarray:
        code = self.picture(name).partition(",")[2]
        return np.asarray(Image.open(io.BytesIO(base64.b64decode(code)))).astype(int)

    def cell(self, table: str, row: int, column: int) -> str:
        return str(self.page.inner_text(f"#{table} tbody tr:nth-child({row + 1}) td:nth-child({column + 1})")).strip()

    def message(self, status: str, text: str) -> None:
        """Wait until a status line shows this text."""
        api.expect(self.page.locator(f"#{status} textarea")).to_have_value(text, timeout=PATIENCE)

    def choose(self, field: str, option: str) -> None:
        self.page.click(f"#{field} input")
        self.page.get_by_role("option", name=option, exact=True).click()

    def sampled(self, title: str) -> None:
        """Wait for the samples with this title."""
        api.expect(self.page.locator("#title")).to_have_text(title, timeout=PATIENCE)

    def wait(self, selector: str) -> None:
        self.page.wait_for_selector(selector)

    def tab(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()

    def shot(self, path: Path) -> None:
        self.page.screenshot(path=path, full_page=True)

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))


def exact(seed: int, n: int) -> np.ndarray:
    """What the page should show of these samples."""
    labels = torch.arange(n) % 10
    x = jf.load("mnist-small").sample(n, seed=seed, labels=labels, plan="sequential").x
    return np.asarray(views.grid(x, columns=views.grid_columns(n, range(10)))).astype(int)


def test_sampling_walking_and_messages(browser: Any, address: str) -> None:
    with Visitor(browser, address) as visitor:
        page = visitor.page
        visitor.choose("plan", "selective")
        visitor.ask(count=4, seed=3)
        visitor.press("go")
        page.wait_for_selector("#status .progress-text, #status .progress-level")  # something is seen meanwhile
        visitor.sampled("mnist-small: 4 samples from seed 3, sequential and selective")

        # pictures and figures
        assert np.abs(visitor.pixels("sequential") - exact(3, 4)).max() <= 1
        assert np.abs(visitor.pixels("planned") - exact(3, 4)).mean() < 3
        assert visitor.pixels("difference").max() > 100
        assert re.fullmatch(r"[\d.]+ m?s", visitor.cell("summary", 0, 1))
        assert [visitor.cell("summary", i, 0) for i in range(3)] == ["plain loop", "sequential", "selective"]
        gain, headline = visitor.cell("summary", 2, 2), page.inner_text("#headline")
        assert 0 < float(visitor.cell("summary", 2, 3)) < 0.5
        if gain == "too noisy":
            assert headline == "selective against the plain loop: too noisy to tell"
        else:
            assert re.fullmatch(r"[\d.]+x", gain)
            assert re.fullmatch(r"selective (is [\d.]+x (fast|slow)er than|takes as long as) the plain loop", headline)
        assert page.locator("#blocks tbody tr").count() == 4
        assert visitor.pixels("convergence").std() > 10
        assert page.inner_text("#title") == "mnist-small: 4 samples from seed 3, sequential and selective"

        # walking changes the picture, and the single positions follow
        swept, single = visitor.picture("after-sweeps"), visitor.picture("after-positions")
        page.locator("#sweeps input[type=range]").press("ArrowRight")
        page.get_by_text(re.compile(r"after 1 of \d+ sweeps")).wait_for()
        page.get_by_text("after 1 of 48 steps").wait_for()
        assert visitor.picture("after-sweeps") != swept
        assert visitor.picture("after-positions") != single
        page.locator("#sweeps input[type=range]").press("End")
        page.get_by_text(re.compile(r"after (\d+) of \1 sweeps")).wait_for()
        swept = visitor.picture("after-sweeps")
        page.locator("#positions input[type=range]").press("End")
        page.get_by_text("after 48 of 48 steps").wait_for()
        assert visitor.picture("after-sweeps") == swept
        assert np.abs(visitor.pixels("after-positions")[2:30, 2:30] - exact(3, 4)[2:30, 2:30]).mean() < 3

        # an emptied field is a message, and what was there stays
        visitor.ask(seed="")
        visitor.press("go")
        visitor.message("status", "Seed: give a whole number from 0 to 4294967295")
        assert np.abs(visitor.pixels("sequential") - exact(3, 4)).max() <= 1
        visitor.ask(seed=3, count=1000)
        visitor.press("go")
        visitor.message("status", "Count: give a whole number from 1 to 64")
        assert visitor.away == visitor.rejected == []
        assert "Traceback" not in page.content()


def test_uploads_and_drawings(browser: Any, address: str, tmp_path: Path) -> None:
    digit = np.full((60, 60), 250, np.uint8)  # dark on light
    digit[10:50, 26:33] = 10
    Image.fromarray(digit).save(tmp_path / "one.png")
    (tmp_path / "wrong.png").write_bytes(b"not a picture at all")
    with Visitor(browser, address) as visitor:
        page = visitor.page
        visitor.tab("Invert")

        # nothing drawn, then something
        visitor.press("invert-drawing")
        visitor.message("invert-status", "the canvas is empty: draw something first")
        box = page.locator("#pad canvas").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 4
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x, y + box["height"] / 2, steps=5)
        page.mouse.up()
        visitor.press("invert-drawing")
        visitor.wait("#reconstruction img")
        drawn = visitor.picture("image")
        assert visitor.pixels("image")[14, 13:15].max() > 150
        assert float(visitor.cell("inverted", 1, 1)) < 0.5

        # a wrong upload, then a right one
        page.get_by_role("tab", name="Upload").click()
        page.set_input_files("#upload input[type=file]", tmp_path / "wrong.png")
        page.locator("#upload").get_by_text("wrong").wait_for()
        visitor.press("invert-upload")
        visitor.message("invert-status", "this is not a readable image: upload a PNG, JPEG or WebP")
        assert visitor.picture("image") == drawn
        page.locator("#upload button[aria-label*=lear], #upload button[aria-label*=emove]").first.click()
        page.set_input_files("#upload input[type=file]", tmp_path / "one.png")
        page.locator("#upload").get_by_text("one").first.wait_for()
        visitor.press("invert-upload")
        page.get_by_text("dark and light exchanged").wait_for()
        seen, back = visitor.pixels("image"), visitor.pixels("reconstruction")
        assert seen[14, 13:15].min() > 150 > 100 > seen[:, :8].max()
        assert np.abs(seen - back).max() < 30
        assert re.fullmatch(r"-?[\d,.]+ nats", visitor.cell("inverted", 3, 1))
        assert page.locator("#scores meter").count() == 10
        assert visitor.away == visitor.rejected == []
        assert "Traceback" not in page.content()


def test_two_visitors_at_once_get_their_own(browser: Any, address: str) -> None:
    with Visitor(browser, address) as one, Visitor(browser, address) as two:
        one.ask(seed=11, count=2)
        two.ask(seed=12, count=3)
        for visitor in (one, two):
            visitor.press("go")
        for visitor, seed, n in ((two, 12, 3), (one, 11, 2)):
            visitor.sampled(f"mnist-small: {n} samples from seed {seed}, sequential and auto")
        before = two.picture("after-sweeps")
        one.page.locator("#sweeps input[type=range]").press("ArrowRight")
        one.page.get_by_text(re.compile(r"after 1 of \d+ sweeps")).wait_for()
        two.page.locator("#positions input[type=range]").press("ArrowRight")
        two.page.get_by_text("after 1 of 48 steps").wait_for()
        assert two.picture("after-sweeps") == before != one.picture("after-sweeps")
        for visitor, seed, n in ((one, 11, 2), (two, 12, 3)):
            assert np.abs(visitor.pixels("sequential") - exact(seed, n)).max() <= 1


def test_plans_and_narrow_windows(browser: Any, address: str, tmp_path: Path) -> None:
    with Visitor(browser, address, width=390, theme="dark") as visitor:
        button = visitor.page.locator("#go").bounding_box()
        assert button["y"] + button["height"] < 900  # is seen without scrolling
        visitor.ask(count=2)
        visitor.press("go")
        visitor.sampled("mnist-small: 2 samples from seed 0, sequential and auto")
        assert visitor.overflow() <= 0
        wide = visitor.page.locator("#sequential img").bounding_box()["width"]
        assert wide > 250  # pictures use the window
        visitor.tab("Plans")
        visitor.press("show-plan")
        visitor.page.get_by_text("Plan auto uses this plan").wait_for()
        assert visitor.overflow() <= 0
        visitor.tab("Invert")
        assert visitor.page.locator("#pad canvas").bounding_box()["width"] > 200
        assert visitor.overflow() <= 0


def test_the_page_opens_with_a_result(browser: Any, address: str) -> None:
    with Visitor(browser, address) as visitor:
        visitor.sampled("mnist-small: 10 samples from seed 0, sequential and auto")
        assert np.abs(visitor.pixels("sequential") - exact(0, 10)).max() <= 1
        assert re.search("(than|against|as) the plain loop", visitor.page.inner_text("#headline"))
        visitor.page.locator("#sweeps input[type=range]").press("ArrowRight")  # it can be stepped through
        visitor.page.get_by_text(re.compile(r"after 1 of \d+ sweeps")).wait_for()
        with visitor.page.expect_download() as found:
            visitor.page.click("#planned a")
        assert found.value.suggested_filename == "planned.png"
        with visitor.page.expect_download() as found:
            visitor.page.get_by_text("numbers (npz)").click()
        assert np.load(found.value.path())["x"].shape == (10, 1, 28, 28)


def test_every_field_has_help(browser: Any, address: str) -> None:
    with Visitor(browser, address) as visitor:
        visitor.choose("plan", "selective")
        visitor.page.click("#more button")
        for tab, fields in {
            "Sample": "model plan tol init guidance denoise runs labels count seed block sweeps positions",
            "Invert": "invert-label",
            "Plans": "tuned-batch labelled",
        }.items():
            visitor.tab(tab)
            for field in fields.split():
                label, help_text = TEXTS["fields"][field]
                for text in (label, help_text):
                    visitor.page.locator(f"#{field}").get_by_text(text, exact=True).first.wait_for()


def test_classes_guidance_and_denoising_in_a_narrow_window(browser: Any, address: str) -> None:
    with Visitor(browser, address, width=390) as visitor:
        page = visitor.page
        visitor.choose("model", "cifar10-cpu")
        page.locator("#labels").get_by_text("truck", exact=True).wait_for()
        button = page.locator("#go").bounding_box()
        assert button["y"] + button["height"] < 900  # is seen without scrolling, above it ten names
        page.click("#more button")
        page.check("#denoise input")
        visitor.ask(guidance=1, count=2, runs=1)
        visitor.press("go")
        visitor.sampled("cifar10-cpu: 2 samples from seed 0, sequential and auto, denoised")
        assert page.locator("#convergence img").bounding_box()["width"] > 600  # can be read, and scrolls
        assert visitor.overflow() <= 0
        before = visitor.picture("planned")
        while page.locator("#labels .token").count():
            page.locator("#labels .token-remove").last.click()
        visitor.press("go")
        visitor.message("status", "Guidance pushes samples towards their label: choose labels, or set it to 0")
        assert visitor.picture("planned") == before


def test_tuning(browser: Any, address: str) -> None:
    with Visitor(browser, address) as visitor:
        visitor.tab("Plans")
        visitor.page.fill("#tuned-batch input", "1")
        visitor.press("tune")
        visitor.page.wait_for_selector("#tune-status .progress-text, #tune-status .progress-level")
        visitor.page.get_by_text(re.compile(r"The fastest of \d+ plans")).wait_for(timeout=4 * PATIENCE)
        assert visitor.cell("tuned-plan", 0, 0) == "1 (next to the noise)"
        visitor.choose("model", "mnist-maf")
        visitor.wait(".stale #tuned-plan")
        assert 0.3 < opacity(visitor, "#tuned-plan") < 0.4  # dimmed, and can be read


def opacity(visitor: Visitor, of: str = "#sequential") -> float:
    """Of something on the page, by default the samples."""
    script = f"let e = document.querySelector('{of}'), o = 1; while (e) {{o *= getComputedStyle(e).opacity;"
    return float(visitor.page.evaluate(f"(() => {{{script} e = e.parentElement}} return o }})()"))


def test_results_go_with_their_model(browser: Any, address: str) -> None:
    with Visitor(browser, address) as visitor:
        page = visitor.page
        button = page.locator("#go").bounding_box()
        assert button["y"] + button["height"] < 900  # is seen without scrolling
        visitor.ask(count=1)
        visitor.press("go")
        visitor.sampled("mnist-small: 1 sample from seed 0, sequential and auto")
        assert opacity(visitor) == 1
        visitor.choose("model", "mnist-maf")
        visitor.wait(".stale #sequential")
        assert opacity(visitor) < 0.5
        visitor.choose("model", "mnist-small")
        page.wait_for_selector(".stale", state="detached")
        assert opacity(visitor) == 1
        visitor.choose("model", "mnist-maf")
        page.wait_for_selector("#labels", state="hidden")
        visitor.choose("plan", "selective")
        page.click("#more button")
        page.wait_for_selector("#tol")
        page.wait_for_selector("#guidance", state="hidden")
        assert float(page.input_value("#tol input")) == jf.load("mnist-maf").default_tol
        visitor.press("go")
        visitor.sampled("mnist-maf: 1 sample from seed 0, sequential and selective")
        page.wait_for_selector(".stale", state="detached")
        page.get_by_text("after 0 of 783 steps").wait_for()
        visitor.choose("plan", "sequential")
        page.wait_for_selector("#tol", state="hidden")
