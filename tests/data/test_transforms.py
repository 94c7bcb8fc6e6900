"""What training adds to images: each in the range that its formula says, a function of the generator only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jacobiflow.data.decoding import Images
from jacobiflow.data.transforms import Batch, prepare, wrong_labels

PIXELS = torch.randint(0, 256, (400, 3, 4, 6), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
IMAGES = Images(PIXELS, torch.arange(400) % 7)
ALL = torch.arange(400)


def made(index: torch.Tensor = ALL, images: Images = IMAGES, seed: int = 0, **options: Any) -> Batch:
    return prepare(images, index, torch.Generator().manual_seed(seed), **options)


def test_nothing_is_added_unless_asked_for():
    index = torch.tensor([5, 2, 5])
    batch = made(index)
    assert torch.equal(batch.x, PIXELS[index].float() / 127.5 - 1)
    assert batch.labels.tolist() == [5, 2, 5]
    assert made(images=Images(PIXELS)).labels is None


def test_gaussian():
    noise = made(noise="gaussian", noise_std=0.1).x - made().x
    assert noise.std().item() == pytest.approx(0.1, rel=0.02)
    assert noise.mean().item() == pytest.approx(0, abs=0.003)


def test_dequantize_stays_within_a_pixels_step():
    u = (made(noise="dequantize").x + 1) * 128 - PIXELS
    assert u.min() >= -1e-4
    assert u.max() <= 1 + 1e-4
    assert u.mean().item() == pytest.approx(0.5, abs=0.01)
    assert u.std().item() == pytest.approx(12**-0.5, rel=0.02)


def test_binary():
    x = made(noise="binary").x
    assert torch.equal(x >= 0, PIXELS > 127)
    assert x.min() >= -1
    assert x.max() < 1
    assert (x % 1).mean().item() == pytest.approx(0.5, abs=0.01)


def test_flips_mirror_about_half_of_the_images():
    plain, flipped = made().x, made(flip=True).x
    same = (flipped == plain).flatten(1).all(1)
    mirrored = (flipped == plain.flip(-1)).flatten(1).all(1)
    assert (same | mirrored).all()
    assert 150 < mirrored.sum() < 250


def test_dropped_labels():
    labels = made(label_drop=0.1).labels
    dropped = labels == -1
    assert 20 < dropped.sum() < 65
    assert torch.equal(labels[~dropped], IMAGES.labels[~dropped])


@pytest.mark.parametrize("noise", ["gaussian", "dequantize", "binary"])
def test_the_generator_decides(noise):
    options = {"noise": noise, "noise_std": 0.1, "flip": True, "label_drop": 0.5}
    a, b, c = made(**options), made(**options), made(seed=1, **options)
    assert torch.equal(a.x, b.x)
    assert torch.equal(a.labels, b.labels)
    assert not torch.equal(a.x, c.x)
    assert not torch.equal(a.labels, c.labels)
    before = PIXELS.clone()
    made(**options)
    assert torch.equal(PIXELS, before)


def test_wrong_labels_are_of_the_classes_that_look_most_alike():
    shades = torch.tensor([0, 10, 30, 60, 250, 100])  # class 5 stands between 3 and 4
    labels = torch.arange(600) % 6
    images = Images(shades[labels].byte()[:, None, None, None].expand(-1, 1, 2, 2), labels)
    means, draw = (shades / 127.5 - 1)[:, None].expand(-1, 4), torch.Generator().manual_seed(0)
    wrong = wrong_labels(prepare(images, torch.arange(600), draw).x, labels, means, draw)
    assert not (wrong == labels).any()
    nearest = [set(wrong[labels == k].tolist()) for k in range(6)]
    assert nearest == [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {1, 2, 5}, {2, 3, 5}, {1, 2, 3}]
    assert all((wrong[labels == 4] == k).float().mean() > 0.2 for k in nearest[4])
