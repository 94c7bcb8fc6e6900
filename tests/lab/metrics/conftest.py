"""A flow of small images and images for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import jacobiflow as jf
from jacobiflow.data.decoding import Images
from stand_ins import Tiny, image_flow, make_clip


@pytest.fixture
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture(scope="session")
def flow() -> jf.TarFlow:
    """A perturbed class-conditional flow of grey 16 x 16 images, with the noise of training to remove."""
    return image_flow()


@pytest.fixture(scope="session")
def images() -> Images:
    draw = torch.Generator().manual_seed(5)
    pixels = torch.randint(0, 256, (60, 1, 16, 16), generator=draw, dtype=torch.uint8)
    return Images(pixels, torch.arange(60) % 3)


@pytest.fixture(scope="session")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clip")
    make_clip(folder)
    return folder
