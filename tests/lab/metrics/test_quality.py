"""BRISQUE and CLIP-IQA: what they say of single images."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from jacobiflow_lab.metrics import (
    ClipScorer,
    MetricError,
    brisque,
    brisque_scores,
    mean_brisque,
    mean_clip_iqa,
)


def natural(n: int, side: int, seed: int = 0) -> Tensor:
    """Pictures whose spectrum falls as 1 / f, as that of photographs does."""
    draw = torch.Generator().manual_seed(seed)
    across = torch.fft.fftfreq(side)
    f = (across[:, None] ** 2 + across[None] ** 2).sqrt().clamp_min(1 / side)
    x = torch.fft.ifft2(torch.fft.fft2(torch.randn(n, 1, side, side, generator=draw)) / f).real
    x = x / x.flatten(1).abs().amax(1)[:, None, None, None]
    return ((x + 1) * 127.5).round().byte()


def noise(n: int, side: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (n, 1, side, side), generator=draw, dtype=torch.uint8)


@pytest.mark.parametrize("side", [28, 32, 96])
def test_noise_is_worse_than_nature(side: int) -> None:
    good, bad = brisque_scores(natural(6, side)), brisque_scores(noise(6, side))
    assert good.isfinite().all()
    assert bad.isfinite().all()
    assert good.mean() + 20 < bad.mean()


def test_scores_are_the_packages_where_its_fit_ends() -> None:
    package = pytest.importorskip("brisque")
    pictures = natural(8, 64)
    found, judge, same = brisque_scores(pictures), package.BRISQUE(url=False), 0
    shapes: list[float] = []
    fit = package.BRISQUE.asymmetric_generalized_gaussian_fit

    class Watched(package.BRISQUE):  # type: ignore[misc, name-defined]
        def asymmetric_generalized_gaussian_fit(self, x: np.ndarray) -> object:
            out = fit(self, x)
            shapes.append(float(np.ravel(out[0])[0]))
            return out

    judge = Watched(url=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for picture, score in zip(pictures, found.tolist(), strict=True):
            shapes.clear()
            want = judge.score(np.repeat(picture.permute(1, 2, 0).numpy(), 3, 2))
            if all(0.2 < shape < 10 for shape in shapes):
                assert score == pytest.approx(float(want), abs=0.05)
                same += 1
    assert same >= 4


def test_images_without_a_score() -> None:
    flat = torch.full((2, 1, 32, 32), 128, dtype=torch.uint8)
    scores = brisque_scores(torch.cat((natural(3, 32), flat)))
    assert scores.isnan().tolist() == [False] * 3 + [True] * 2
    found = mean_brisque(scores, 32)
    assert (found.images, found.no_score) == (3, 2)
    assert found.value == pytest.approx(float(scores[:3].mean()))
    assert "lower is better" in found.note
    assert "scatters widely" in found.note
    assert "scatters" not in mean_brisque(scores, 256).note
    with pytest.raises(MetricError, match="0 of 2 images have a finite value"):
        mean_brisque(scores[3:], 32)
    with pytest.raises(MetricError, match="BRISQUE needs images of 16 pixels per side or more"):
        brisque_scores(torch.zeros(2, 1, 8, 8))


def test_colour_and_floats_are_taken() -> None:
    grey = natural(2, 32)
    want = brisque_scores(grey)
    assert torch.allclose(brisque_scores(grey.expand(-1, 3, -1, -1)), want)
    assert torch.allclose(brisque_scores(grey.float() / 127.5 - 1), want)


def test_missing_packages(monkeypatch: pytest.MonkeyPatch, clip: Path) -> None:
    brisque._scorer.cache_clear()
    for name in ("brisque", "torchmetrics.multimodal.clip_iqa"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        MetricError, match=r"^BRISQUE needs the package brisque: pip install './lab\[eval\]' in the checkout$"
    ):
        brisque_scores(noise(1, 32))
    with pytest.raises(MetricError, match=r"^CLIP-IQA needs the package torchmetrics: pip install './lab\["):
        ClipScorer(str(clip))


def test_clip_iqa(clip: Path) -> None:
    """The probability of "Good photo." by the model's own embeddings."""
    transformers = pytest.importorskip("transformers")
    x = torch.cat((natural(2, 24), noise(2, 24)))
    scores = ClipScorer(str(clip))(x)
    assert scores.shape == (4,)
    model = transformers.CLIPModel.from_pretrained(clip).eval()
    processor = transformers.CLIPProcessor.from_pretrained(clip)
    words = processor(text=["Good photo.", "Bad photo."], return_tensors="pt", padding=True)
    rows = [np.repeat(row.permute(1, 2, 0).numpy(), 3, 2) for row in x]
    with torch.no_grad():
        out = model(**words, **processor(images=rows, return_tensors="pt"))
    cosine = out.image_embeds @ out.text_embeds.T
    assert torch.allclose(scores.float(), (100 * cosine).softmax(-1)[:, 0], atol=1e-4)
    assert scores.std() > 0
    found = mean_clip_iqa(scores, "small")
    assert (found.value, found.images, found.clip) == (pytest.approx(float(scores.mean())), 4, "small")
    assert torch.allclose(ClipScorer(str(clip))(x.float() / 127.5 - 1), scores, atol=1e-4)


def test_no_clip(tmp_path: Path) -> None:
    with pytest.raises(MetricError, match=r"CLIP-IQA needs the weights of a CLIP: give one as --clip .*folder"):
        ClipScorer(None)
    with pytest.raises(MetricError, match=r"is not a usable CLIP .*give one as --clip"):
        ClipScorer(str(tmp_path))
