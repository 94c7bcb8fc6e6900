"""Bits per dimension of images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jacobiflow.core.rows import Noise
from jacobiflow.data.decoding import Images
from jacobiflow.data.transforms import prepare
from jacobiflow.flows.flow import Flow
from jacobiflow.training.loop import generator
from jacobiflow_lab.metrics.metric import Metric, MetricError, mean_and_error
from jacobiflow_lab.metrics.samples import Sampling

NOTES: dict[str, str] = {
    "dequantize": "an upper bound of the bits per dimension of the 8-bit pixels: x = (pixel + u) / 128 - 1, "
    "u uniform, and log2 128 = 7 bits are added for the scale",
    "binary": "an upper bound of the bits per dimension of black-and-white pixels: x = bit + u - 1, u uniform",
    "gaussian": "the density of images in [-1, 1] plus Gaussian noise of standard deviation {std:g}, which "
    "is what the flow was trained on: not bits of pixels, may be negative, comparable at this noise only",
    "none": "the density of images in [-1, 1] as they are, which are discrete: it has no lower bound",
}
SCALE = {"dequantize": 7.0}  # bits: log2 128, since x = (pixel + u) / 128 - 1


@dataclass(frozen=True, kw_only=True)
class BitsPerDim:
    """Mean bits per dimension over images, and its standard error; lower is better."""

    value: float
    error: float
    images: int
    noise: str
    note: str
    not_finite: int = 0  # images without a finite density; they are left out


def noise_of(flow: Flow) -> Noise:
    """The noise that a flow of images was trained with.

    An older config does not say: it is Gaussian with a noise_std, otherwise taken for "dequantize".
    """
    recorded: Noise | None = flow.config.noise
    return recorded or ("gaussian" if flow.noise_std else "dequantize")


@torch.no_grad()
def bits(flow: Flow, images: Images, index: Tensor, *, noise: Noise, seed: int = 0) -> Tensor:
    """Bits per dimension of images number `index`; the noise added to image i depends on (seed, i) only."""
    std, like = flow.noise_std, next(flow.parameters())
    if noise == "gaussian" and not std:
        raise MetricError("bpd: this flow was trained without Gaussian noise: use dequantize, binary or none")
    parts = [prepare(images, i[None], generator(seed, int(i)), noise=noise, noise_std=std) for i in index]
    x = torch.cat([p.x for p in parts]).reshape(-1, *flow.data_shape)
    labels = None
    if images.labels is not None and flow.num_classes:
        labels = images.labels[index].to(like.device)
    return flow.bits_per_dim(x.to(like), labels).double().cpu() + SCALE.get(noise, 0.0)


def bits_per_dim(values: Tensor, flow: Flow, noise: Noise) -> BitsPerDim:
    """The mean over images of `bits` [N]."""
    mean = mean_and_error("bpd", values)
    note = NOTES[noise].format(std=flow.noise_std)
    return BitsPerDim(**mean, noise=noise, note=note, not_finite=len(values) - mean["images"])


def _bits(sampling: Sampling, index: Tensor) -> Tensor:
    return bits(sampling.flow, sampling.real, index, noise=sampling.noise, seed=sampling.seed)


BITS_PER_DIM = Metric(
    name="bpd",
    help="bits per dimension of real images; lower is better",
    needs=("flow", "real"),
    each=_bits,
    rows=(("bits per dim", "{value:.4f} ± {error:.4f}", "lower", "{images:,} real"),),
    note="bits per dim: {note}",
    result=lambda evidence: bits_per_dim(
        evidence["values"]["bpd"], evidence["sampling"].flow, evidence["sampling"].noise
    ),
)
