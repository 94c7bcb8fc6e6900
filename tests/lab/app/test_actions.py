"""What the buttons of the playground do, without a page."""

from __future__ import annotations

import base64
import io
import os
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import jacobiflow as jf
from jacobiflow_lab.analysis.trajectory import finish
from jacobiflow_lab.app import actions, views
from jacobiflow_lab.app.invert import InversionResult, drawn_pixels, invert, uploaded_pixels
from jacobiflow_lab.app.models import ModelRegistry, UserError
from jacobiflow_lab.app.visitors import Monitor, VisitorLeft

ASKED: dict[str, Any] = {
    "model": "mnist-small",
    "labels": ["3", "7"],
    "count": 3,
    "seed": 5,
    "plan": "selective",
    "tol": 0.5,
    "init": "previous",
    "guidance": 0,
}
INVERTED: dict[str, Any] = {"model": "mnist-small", "plan": "selective", "tol": 0.1, "init": "previous"}


def cells(page: str, table: str) -> list[list[str]]:
    """The texts of a table in HTML, without its head."""
    body = page.partition(f'<table id="{table}">')[2].partition("<tbody>")[2].partition("</tbody>")[0]
    return [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>.*?</tr>", body)]


def text(page: str, name: str = "") -> str:
    """The text of an element in HTML, by its id, or of all."""
    found = re.search(rf'<(\w+) id="{name}">(.*?)</\1>', page, re.DOTALL) if name else None
    return " ".join(re.sub(r"<[^>]*>", " ", found[2] if found else page).split())


@pytest.fixture(scope="module")
def shelf() -> ModelRegistry:
    return ModelRegistry("mnist-small")


@pytest.fixture(scope="module")
def sampled(shelf: ModelRegistry) -> actions.SampleResult:
    return actions.sample(shelf, **ASKED)


@pytest.fixture
def small(tmp_path: Path) -> ModelRegistry:
    """A flow of 4 x 4 pictures that is tuned in no time."""
    torch.manual_seed(0)
    flow = jf.MAF(jf.MAFConfig(features=16, blocks=2, hidden=(16,)))
    for p in flow.parameters():
        p.data += 0.2 * torch.randn_like(p)
    flow.save(tmp_path / "small")
    return ModelRegistry(str(tmp_path / "small"))


# Sample


def test_sampling_compares_the_plan_with_sequential_decoding(sampled: actions.SampleResult) -> None:
    flow = jf.load("mnist-small")
    labels = torch.tensor([3, 7, 3])
    exact = flow.sample(3, seed=5, labels=labels, plan="sequential").x
    x = flow.sample(3, seed=5, labels=labels, plan="selective", tol=0.5, init="previous").x
    assert torch.allclose(sampled.exact, exact, atol=1e-4)
    assert torch.allclose(sampled.decoded.x, x, atol=1e-4)
    base, row = sampled.rows
    assert (base.plan, row.plan) == ("sequential", "selective")
    assert row.largest == pytest.approx(float((sampled.decoded.x - sampled.exact).abs().max()))
    assert sampled.plain is not None
    assert row.speedup == pytest.approx(sampled.plain.seconds / row.seconds)
    assert row.sweeps[0] == 48 > 10 > max(row.sweeps[1:])
    assert len(sampled.convergence.blocks) == len(sampled.decoded.stats.blocks) == 4


def test_the_plain_loop_has_the_same_answer(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    assert sampled.plain is not None
    assert 0 < sampled.plain.largest < 1e-3  # other code, other rounding
    guided = actions.sample(shelf, **ASKED | {"guidance": 1, "count": 1})
    assert guided.plain is None  # it knows no guidance
    headline = text(views.sample_html(shelf["mnist-small"], guided), "headline")
    assert re.search("(than|against|as) sequential decoding", headline)


def test_denoising_and_the_file_of_samples(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    flow, labels = shelf["mnist-small"], torch.tensor([3, 7, 3])
    clean = actions.sample(shelf, **ASKED, denoise=True)
    assert torch.allclose(clean.exact, flow.denoise(sampled.exact, labels), atol=1e-4)
    assert torch.allclose(clean.decoded.x, flow.denoise(sampled.decoded.x, labels), atol=1e-4)
    assert text(views.sample_html(flow, clean), "title").endswith("selective, denoised")
    arrays = np.load(io.BytesIO(views.sample_file(clean)))
    assert np.array_equal(arrays["x"], clean.decoded.x.numpy())
    assert arrays["labels"].tolist() == [3, 7]
    maf = actions.sample(shelf, **ASKED | {"model": "mnist-maf", "count": 1, "denoise": True})
    assert not maf.denoised  # it was trained without Gaussian noise


def test_labels_have_names(shelf: ModelRegistry) -> None:
    assert shelf.label_names("mnist-small") == [str(i) for i in range(10)]
    assert shelf.label_names("mnist-maf") == []
    assert shelf.label_names("cifar10-cpu")[:2] == ["airplane", "automobile"]
    assert [shelf.label_names("cifar100-cpu")[i] for i in (0, 1, 99)] == ["apple", "aquarium fish", "worm"]


def test_labels_of_an_own_model_have_its_names(tmp_path: Path) -> None:
    config = jf.TarFlowConfig(
        image_size=8, image_channels=1, patch_size=4, width=16, head_dim=8, num_classes=2, class_names=("cat", "dog")
    )
    jf.TarFlow(config).save(tmp_path / "own")
    assert ModelRegistry(str(tmp_path / "own")).label_names(str(tmp_path / "own")) == ["cat", "dog"]


def test_guidance_and_tolerance_reach_the_decoder(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    guided = actions.sample(shelf, **ASKED | {"guidance": 2, "count": 2})
    assert float((guided.exact - sampled.exact[:2]).abs().max()) > 0.1
    tight = actions.sample(shelf, **ASKED | {"tol": 0.0, "count": 2, "plan": "uniform"})
    assert tight.rows[1].largest < 1e-3 < sampled.rows[1].largest


def test_progress_is_told_and_grows(shelf: ModelRegistry) -> None:
    seen: list[tuple[float, str]] = []
    actions.sample(shelf, **ASKED | {"count": 1, "runs": 2}, monitor=Monitor(report=lambda *told: seen.append(told)))
    shares = [share for share, _ in seen]
    assert shares == sorted(shares)
    assert shares[0] >= 0
    assert shares[-1] < 1
    steps = {f"decoding batch 1, run 1 of at most 2: {plan}" for plan in ("sequential", "selective")}
    assert steps <= {text for _, text in seen}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": None}, "Count: give a whole number from 1 to 64"),
        ({"count": 65}, "Count"),
        ({"count": 0}, "Count"),
        ({"count": 1.5}, "Count"),
        ({"count": float("nan")}, "Count"),
        ({"count": "7"}, "Count"),
        ({"seed": None}, "Seed"),
        ({"seed": -1}, "Seed"),
        ({"seed": 2**40}, "Seed"),
        ({"tol": None}, "Tolerance: give a number from 0 to 10"),
        ({"tol": float("inf")}, "Tolerance"),
        ({"init": "elsewhere"}, "First guess"),
        ({"guidance": 1e9}, "Guidance"),
        ({"guidance": None}, "Guidance"),
        ({"guidance": 1, "labels": []}, "Guidance pushes samples towards their label: choose labels, or set it to 0"),
        ({"runs": 100}, "Timed runs: give a whole number from 1 to 60"),
        ({"plan": "/etc/passwd"}, "Plan: choose sequential"),
        ({"labels": ["10"]}, "Labels: choose at most 10 from 0 to 9"),
        ({"labels": ["-1"]}, "Labels"),
        ({"labels": [None]}, "Labels"),
        ({"labels": ["1"] * 11}, "Labels: choose at most 10 from"),
        ({"model": "somebody/else"}, "no model 'somebody/else'"),
        ({"model": ["mnist-small"]}, "no model"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_for_gets_a_message(shelf: ModelRegistry, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        actions.sample(shelf, **ASKED | wrong)
    assert len(str(refused.value)) < 200


def test_a_field_that_a_plan_does_not_take_may_be_empty(shelf: ModelRegistry) -> None:
    found = actions.sample(shelf, **ASKED | {"plan": "sequential", "tol": None, "init": None, "count": 1})
    assert torch.equal(found.decoded.x, found.exact)
    assert "every pixel is the same" in views.sample_pictures(shelf["mnist-small"], found)["difference"][1]
    rows = cells(views.sample_html(shelf["mnist-small"], found), "summary")
    assert [row[0] for row in rows] == ["plain loop", "sequential"]
    assert "by chance only" not in views.sample_html(shelf["mnist-small"], found)


@pytest.mark.parametrize("model", ["mnist-maf", "ising-16"])
def test_models_without_labels(shelf: ModelRegistry, model: str) -> None:
    flow = shelf[model]
    found = actions.sample(shelf, **ASKED | {"model": model, "tol": 1e-4, "count": 2, "guidance": None})
    assert found.labels == []
    assert found.rows[1].largest < 1e-3
    assert found.convergence.blocks[0].length == flow.data_shape[0]
    white = views.white_level(flow, found.exact)
    assert white == (1.0 if model == "mnist-maf" else pytest.approx(float(found.exact.abs().max())))
    shown = views.grid(found.exact, white=white)
    assert float(np.asarray(shown).std()) > 20  # neither all black nor all white


# Stepping through a block


def test_sweeps_lead_to_the_answer_and_positions_too(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    way = actions.block_steps(shelf, sampled, 1)
    last, full = len(way.swept) - 1, way.length - 1
    assert full == 48
    assert 3 < last < full  # the plan is sequential here: sweeps are shown all the same
    first, _ = actions.samples_after(shelf, sampled, way, 0, 0)
    swept, sequential = actions.samples_after(shelf, sampled, way, last, full)
    assert float((sequential - sampled.exact).abs().mean()) < 0.005
    assert float((swept - sampled.exact).abs().mean()) < 0.05
    assert float((first - sampled.exact).abs().mean()) > 0.2
    halfway = actions.samples_after(shelf, sampled, way, last // 2, last // 2)
    off = [float((x - sampled.exact).abs().mean()) for x in halfway]
    assert off[0] < off[1]  # after as many steps, sweeps are nearer


def test_the_plan_is_walked_as_it_is(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    way = actions.block_steps(shelf, sampled, 4)
    most = actions.sample(shelf, **ASKED).rows[1].sweeps[3]
    assert most <= len(way.swept) - 1 <= 4
    assert torch.allclose(shelf["mnist-small"].from_sequence(way.swept[-1]), sampled.decoded.x, atol=1e-4)


def test_every_position_of_784_can_be_stopped_at(shelf: ModelRegistry) -> None:
    flow = shelf["mnist-maf"]
    found = actions.sample(shelf, **ASKED | {"model": "mnist-maf", "tol": 1e-4, "count": 1})
    way = actions.block_steps(shelf, found, 1)  # in the reversed order
    assert way.length == 784
    for step in (0, 1, 400, 782):
        moved = (way.after_positions(step + 1) != way.after_positions(step)).any(-1)[0].nonzero()[:, 0]
        assert moved.tolist() == [784 - 1 - (step + 1)]
    whole = finish(flow, way.after_positions(783), 0)
    assert torch.allclose(whole, found.exact, atol=1e-3)
    for step in (784, -1, None, 0.5):
        with pytest.raises(UserError, match="Positions"):
            actions.samples_after(shelf, found, way, 0, step)


def test_walks_of_two_visitors_do_not_meet(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    before = actions.samples_after(shelf, sampled, actions.block_steps(shelf, sampled, 2), 1, 1)
    other = actions.sample(shelf, **ASKED | {"seed": 6, "labels": []})
    actions.block_steps(shelf, other, 3)
    after = actions.samples_after(shelf, sampled, actions.block_steps(shelf, sampled, 2), 1, 1)
    assert torch.equal(before[0], after[0])
    assert not torch.allclose(sampled.exact, other.exact, atol=0.1)


def test_stepping_needs_a_block_that_is_there(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    for block in (0, 5, None):
        with pytest.raises(UserError, match="Block: give a whole number from 1 to 4"):
            actions.block_steps(shelf, sampled, block)


# Invert


def digit(size: int = 28) -> np.ndarray:
    """A bar, light on dark."""
    pixels = np.zeros((size, size), np.uint8)
    pixels[size // 6 : -size // 6, size // 2 - size // 14 : size // 2 + size // 14] = 255
    return pixels


def saved(path: Path, picture: Image.Image, **options: Any) -> Path:
    picture.save(path, **options)
    return path


@pytest.mark.parametrize("model", ["mnist-small", "mnist-maf"])
def test_an_upload_is_reconstructed(shelf: ModelRegistry, tmp_path: Path, model: str) -> None:
    flow = shelf[model]
    path = saved(tmp_path / "one.png", Image.fromarray(digit()))
    found = invert(shelf, **INVERTED | {"model": model, "upload": path, "tol": 1e-3})
    assert float(found.error.max()) < 0.02
    assert float(found.error.max()) == pytest.approx(float((found.decoded.x - found.x).abs().max()))
    assert found.log_prob == pytest.approx(float(flow.log_prob(found.x).detach()), rel=1e-4)
    ink = (found.x.reshape(28, 28).numpy() > 0) == (digit() > 127)
    assert ink.mean() > 0.99  # the picture, with no more than the noise of training
    assert float((found.x - found.x.round()).abs().max()) > 0.05
    assert not found.inverted
    assert len(views.inversion_pictures(found)) == 4
    names = shelf.label_names(model)
    assert len(views.label_scores(found, names)) == (10 if model == "mnist-small" else 0)
    rows = cells(views.inversion_html(found, names), "inverted")
    assert ["bits per dimension", f"{found.bits_per_dim:.3f}"] in rows


def test_a_loose_inversion_is_not_called_converged(shelf: ModelRegistry, tmp_path: Path) -> None:
    path = saved(tmp_path / "one.png", Image.fromarray(digit()))
    for tol, word in ((1.0, "far from exact"), (1e-3, "converged")):
        found = invert(shelf, **INVERTED | {"plan": "uniform", "upload": path, "tol": tol})
        assert ["status", word] in cells(views.inversion_html(found, []), "inverted")


def test_a_label_changes_the_likelihood(shelf: ModelRegistry, tmp_path: Path) -> None:
    path = saved(tmp_path / "one.png", Image.fromarray(digit()))
    plain = invert(shelf, **INVERTED, upload=path)
    as_one = invert(shelf, **INVERTED, upload=path, label="1")
    assert as_one.log_prob == pytest.approx(plain.by_label[1], rel=1e-4)
    assert as_one.log_prob != plain.log_prob
    assert plain.by_label.index(max(plain.by_label)) == 1
    assert sum(p for _, p in views.label_scores(plain, shelf.label_names("mnist-small")).values()) == pytest.approx(1)


MODES = {
    "dark on light": lambda: Image.fromarray(255 - digit(100)),
    "RGB": lambda: Image.fromarray(digit(64)).convert("RGB"),
    "palette": lambda: Image.fromarray(digit(64)).convert("P"),
    "one bit": lambda: Image.fromarray(digit(64)).convert("1"),
    "16 bit": lambda: Image.fromarray(digit(64).astype(np.uint16) * 257),
    "transparent paper": lambda: Image.merge("LA", [Image.new("L", (64, 64)), Image.fromarray(digit(64))]),
    "one pixel": lambda: Image.new("L", (1, 1), 200),
    "a thin strip": lambda: Image.new("L", (1000, 2), 0),
}


@pytest.mark.parametrize("mode", MODES)
def test_pictures_of_every_kind_are_read(shelf: ModelRegistry, tmp_path: Path, mode: str) -> None:
    pixels, negative = uploaded_pixels(saved(tmp_path / "a.png", MODES[mode]()), shelf["mnist-small"])
    assert pixels.shape == (1, 28, 28)
    assert negative == (mode in ("dark on light", "transparent paper", "one pixel"))
    if mode not in ("one pixel", "a thin strip"):
        assert pixels[0, 14, 14] > 200
        assert pixels[0, :, :4].max() < 20


def claim(width: int, height: int) -> bytes:
    """A PNG that says it is that large, and holds nothing."""
    size = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = [(b"IHDR", size), (b"IDAT", b""), (b"IEND", b"")]
    sealed = (struct.pack(">I", len(x)) + k + x + struct.pack(">I", zlib.crc32(k + x)) for k, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(sealed)


def png_bytes() -> bytes:
    file = io.BytesIO()
    Image.fromarray(digit(200)).save(file, "PNG")
    return file.getvalue()


def float_tiff() -> bytes:
    file = io.BytesIO()
    Image.fromarray(digit().astype(np.float32)).save(file, "TIFF")
    return file.getvalue()


BAD = {
    "text": (lambda: b"seven", "not a readable image"),
    "empty": (lambda: b"", "not a readable image"),
    "half of one": (lambda: png_bytes()[:200], "cannot be read"),
    "a huge one": (lambda: claim(50_000, 10), "50000 x 10 pixels: upload at most 6000 x 6000"),
    "a bomb": (lambda: claim(60_000, 60_000), "not a readable image|pixels"),
    "floats": (float_tiff, "cannot be read .*float pixels"),
    "a large file": (lambda: bytes(11 * 2**20), "the file has 11 MB: upload at most 10 MB"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_upload_gets_a_message(shelf: ModelRegistry, tmp_path: Path, kind: str) -> None:
    content, message = BAD[kind]
    (tmp_path / "a.png").write_bytes(content())
    with pytest.raises(UserError, match=message) as refused:
        invert(shelf, **INVERTED, upload=tmp_path / "a.png")
    assert len(str(refused.value)) < 250
    assert "\n" not in str(refused.value)


def test_devices_and_pipes_are_not_opened(shelf: ModelRegistry, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/zero"), tmp_path):
        with pytest.raises(UserError, match="upload it again"):
            invert(shelf, **INVERTED, upload=path)


@pytest.mark.parametrize("given", [{"upload": None}, {"upload": "/no/such/file"}, {"drawing": ""}], ids=str)
def test_nothing_to_invert_gets_a_message(shelf: ModelRegistry, given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"upload|empty|read"):
        invert(shelf, **INVERTED, **given)


def canvas(alpha: np.ndarray) -> str:
    """A drawing as the page sends it."""
    file = io.BytesIO()
    white = np.full_like(alpha, 255)
    Image.fromarray(np.dstack([white, white, white, alpha])).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_a_drawing_fills_the_frame_that_digits_have(shelf: ModelRegistry) -> None:
    alpha = np.zeros((280, 280), np.uint8)
    alpha[10:60, 200:210] = 255  # small, in a corner
    pixels = drawn_pixels(canvas(alpha), shelf["mnist-small"])
    rows, columns = (np.flatnonzero(pixels[0].max(axis) > 127) for axis in (1, 0))
    assert (rows[0], rows[-1]) == (4, 23)  # 20 of 28
    assert 12 <= columns[0] <= columns[-1] <= 17
    found = invert(shelf, **INVERTED, drawing=canvas(alpha))
    assert isinstance(found, InversionResult)
    assert float(found.error.max()) < 0.1


@pytest.mark.parametrize(
    "value",
    [
        canvas(np.zeros((280, 280), np.uint8)),
        canvas(np.full((20, 2000), 255, np.uint8)),
        "data:image/png;base64,@@",
        "data:text/plain;base64,aGVsbG8=",
        "data:image/png;base64,aGVsbG8=",
        {"layers": []},
        7,
    ],
    ids=["clear", "large", "no base64", "no picture", "no PNG", "a dict", "a number"],
)
def test_what_is_no_drawing_gets_a_message(shelf: ModelRegistry, value: Any) -> None:
    with pytest.raises(UserError, match="draw"):
        invert(shelf, **INVERTED, drawing=value)


def test_fields_on_a_lattice_cannot_be_drawn(shelf: ModelRegistry) -> None:
    assert shelf.names == ["mnist-small", "cifar10", "cifar10-cpu", "cifar100-cpu", "ising-16", "mnist", "mnist-maf"]
    assert shelf.invertible == ["mnist-small", "cifar10", "cifar10-cpu", "cifar100-cpu", "mnist", "mnist-maf"]
    with pytest.raises(UserError, match="choose a model of images: mnist-small or cifar10 or cifar10-cpu or cifar100"):
        invert(shelf, **INVERTED | {"model": "ising-16"}, drawing="x")


# Plans


def test_a_plan_is_made_shown_and_used(small: ModelRegistry) -> None:
    name = small.names[0]
    flow = small[name]
    found = actions.sample(small, **ASKED | {"model": name, "plan": "auto", "count": 2})
    assert "auto decodes every block sequentially here" in text(views.sample_html(flow, found))
    asked: dict[str, Any] = {"model": name, "batch": 2, "labelled": True, "guidance": None}
    before = actions.machine_plan(small, **asked, measure=False)
    assert [method.width for method in before.plan] == [1, 1]  # there is no profile
    assert "Plan auto uses this plan" in text(views.plan_html(before))
    rows = cells(views.plan_html(before), "tuned-plan")
    assert rows == [["1 (next to the noise)", "sequential"], ["2 (next to the data)", "sequential"]]
    seen: list[float] = []
    made = actions.machine_plan(
        small, **asked, measure=True, monitor=Monitor(report=lambda share, _: seen.append(share))
    )
    assert seen == sorted(seen)
    assert seen[-1] < 1
    measured, shown = made.plan.about["measured"], text(views.plan_html(made))
    change = f"This plan {views.compared(measured['speedup'], 'sequential decoding')}."
    assert (change if measured["stable"] else "The speed-up is too noisy to tell.") in " ".join(shown.split())
    assert [len(row) for row in cells(views.plan_html(made), "tuned-plan")] == [2, 2]  # no empty cells
    assert f"The fastest of {len(made.plan.about['tried'])} plans" in text(views.plan_html(made))
    assert flow.profile is not None  # which plan auto uses from now on
    found = actions.sample(small, **ASKED | {"model": name, "plan": "auto", "count": 2})
    assert found.plan == flow.plan("auto", n=2)


def test_guidance_without_labels_is_not_tuned(shelf: ModelRegistry) -> None:
    asked: dict[str, Any] = {"model": "mnist-small", "batch": 2, "guidance": 1, "measure": False}
    with pytest.raises(UserError, match="choose labels"):
        actions.machine_plan(shelf, **asked, labelled=False)
    assert actions.machine_plan(shelf, **asked, labelled=True).guidance.weight == 1


def test_a_batch_size_that_cannot_be(small: ModelRegistry) -> None:
    asked: dict[str, Any] = {"model": small.names[0], "batch": None, "labelled": False, "guidance": 0}
    with pytest.raises(UserError, match="Batch size: give a whole number from 1 to 64"):
        actions.machine_plan(small, **asked, measure=True)


def test_tuning_ends_when_nobody_waits_for_it(small: ModelRegistry) -> None:
    name, calls = small.names[0], 0
    asked: dict[str, Any] = {"model": name, "batch": 1, "labelled": False, "guidance": 0}

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise VisitorLeft("the visitor has left")

    with pytest.raises(VisitorLeft):
        actions.machine_plan(small, **asked, measure=True, monitor=Monitor(check=check))
    assert calls == 3
    assert not small.lock.locked()


def test_what_the_page_cannot_show_is_refused_or_left_out(tmp_path: Path) -> None:
    jf.MAF(jf.MAFConfig(features=6, blocks=1, hidden=(8,))).save(tmp_path / "six")
    jf.MAF(jf.MAFConfig(features=16, context=2, blocks=1, hidden=(8,))).save(tmp_path / "context")
    with pytest.raises(UserError, match="its samples are not images"):
        ModelRegistry(str(tmp_path / "six"))
    with pytest.raises(UserError, match="it needs context"):
        ModelRegistry(str(tmp_path / "context"))


# Pictures


def test_the_map_is_brightest_where_the_deviation_is() -> None:
    exact = torch.zeros(4, 1, 5, 5)
    x = exact.clone()
    x[2, 0, 1, 3] = -0.25
    x[3, 0, 0, 0] = float("nan")
    picture, top = views.deviation_grid(x, exact, columns=2)
    shown = np.asarray(picture)
    assert top == 0.25
    gap = views.GAP_PIXELS
    corner = (gap + 5 + gap, gap)  # of sample 2, the first of the second row
    at = (corner[0] + 1, corner[1] + 3)
    inner = shown[corner[0] : corner[0] + 5, corner[1] : corner[1] + 5].astype(int).sum(-1)
    assert tuple(np.argwhere(inner == inner.max())[0]) == (1, 3)
    assert shown[at].sum() > 500
    assert tuple(shown[gap + 5 + gap, gap + 5 + gap]) == views.NONFINITE_COLOUR


@pytest.mark.parametrize("channels", [1, 3])
def test_a_sample_that_is_not_finite_is_crossed_out(channels: int) -> None:
    x = torch.full((2, channels, 8, 8), -1.0)
    x[1, 0, 3, 3] = float("inf")
    shown, gap = np.asarray(views.grid(x, columns=2)), views.GAP_PIXELS
    first, second = (shown[gap : gap + 8, left : left + 8] for left in (gap, 2 * gap + 8))
    assert (first == 0).all()
    diagonal = np.arange(8)
    assert (second[diagonal, diagonal] < 64).all()
    assert (second[diagonal, 7 - diagonal] < 64).all()
    assert (second[0, 1:7] > 160).all()


def test_grids_show_samples_in_order() -> None:
    x = torch.linspace(-1, 1, 6)[:, None, None, None].expand(6, 1, 4, 4)
    shown = np.asarray(views.grid(x, columns=3))
    assert shown.shape == (2 * 6 + 2, 3 * 6 + 2)
    centres = [int(shown[4 + 6 * (i // 3), 4 + 6 * (i % 3)]) for i in range(6)]
    assert centres == [0, 51, 102, 153, 204, 255]


def steady(result: actions.SampleResult, *, stable: bool = True) -> actions.SampleResult:
    """The result, as if its runs agreed on the speed-ups, or did not."""
    assert result.plain is not None
    base, row = (replace(r, stable=stable) for r in result.rows)
    return replace(result, plain=replace(result.plain, stable=True), rows=(base, row))


def test_speed_ups_of_a_single_run_are_not_shown(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    once = actions.sample(shelf, **ASKED | {"count": 1, "runs": 1})
    for result in (once, steady(sampled, stable=False)):
        page = views.sample_html(shelf["mnist-small"], result)
        assert text(page, "headline") == "selective against the plain loop: too noisy to tell"
        assert "instead of" not in text(page)
        assert [row[2] for row in cells(page, "summary")][1:] == ["too noisy"] * 2


def test_results_say_what_they_are(shelf: ModelRegistry, sampled: actions.SampleResult) -> None:
    sampled = steady(sampled)
    page = views.sample_html(shelf["mnist-small"], sampled)
    assert text(page, "title") == "mnist-small: 3 samples from seed 5, sequential and selective"
    plain, sequential, selective = cells(page, "summary")
    assert [row[0] for row in (plain, sequential, selective)] == ["plain loop", "sequential", "selective"]
    assert (plain[2], sequential[3]) == ("1x", "0")
    assert sampled.plain is not None
    ratio = sampled.plain.seconds / sampled.rows[1].seconds
    assert selective[2] == f"{ratio:.2g}x"
    assert text(page, "headline") == f"selective {views.compared(ratio, 'the plain loop')}"
    blocks = cells(views.block_html(sampled), "blocks")
    assert blocks[0][:3] == ["1 (next to the noise)", "sequential", "48.0 of 48"]
    assert [row[1] for row in blocks[1:]] == ["sweeps, tol 0.5, init previous"] * 3
    steps = actions.block_steps(shelf, sampled, 1)
    after = actions.samples_after(shelf, sampled, steps, 0, 0)
    pictures = views.step_html(shelf["mnist-small"], sampled, steps, after, 0, 0)
    (wide, high), gap = Image.open(io.BytesIO(base64.b64decode(pictures.split("base64,")[1].split('"')[0]))).size, 2
    assert (wide, high) == (3 * (28 + gap) + gap, 28 + 2 * gap)  # three samples leave no empty tiles
    curves, caption = views.convergence_picture(sampled)
    assert "each block" in caption
    assert np.asarray(curves).std() > 10
