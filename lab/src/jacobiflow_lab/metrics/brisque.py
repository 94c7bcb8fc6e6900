"""BRISQUE: how natural the pixels of an image are, without a reference (Mittal et al., 2012).

Lower is better: the score is a predicted loss of quality, whatever arrow the paper prints beside it. The trained
regression is that of the package brisque. The method uses statistics of 7 x 7 neighbourhoods at full and at half size,
and was trained on photographs of several hundred pixels. On 28 or 32 pixels it works, but scores scatter widely and
leave the usual range of 0 to 100. Drawings such as MNIST's digits are unlike its training data, and images of one
colour have no score. Use means over many images of one size to compare decoders of one model, and nothing else.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jacobiflow_lab.metrics.inception import as_pixels
from jacobiflow_lab.metrics.metric import Metric, MetricError, Score, mean_and_error, optional

MIN_SIDE = 16  # pixels: half of it still holds a neighbourhood
SMALL_SIDE = 128  # pixels: below it scores scatter widely


@dataclass(frozen=True, kw_only=True)
class Brisque:
    """Mean score over images and its standard error; lower is better."""

    value: float
    error: float
    images: int
    no_score: int  # images of one colour and the like; they are left out
    note: str


def brisque_scores(images: Tensor) -> Tensor:
    """The score of each image [N, 1 or 3, H, W], uint8 or floats in [-1, 1]; NaN where there is none."""
    pixels = as_pixels(images)
    if min(pixels.shape[2:]) < MIN_SIDE:
        raise MetricError(f"BRISQUE needs images of {MIN_SIDE} pixels per side or more, not {list(pixels.shape[2:])}")
    rows = pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu().numpy()
    scorer = _scorer()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # an image without a score gets NaN
        return torch.tensor([float(scorer.score(row)) for row in rows], dtype=torch.float64)


def mean_brisque(scores: Tensor, side: int) -> Brisque:
    """The mean of scores [N] of images of `side` pixels."""
    mean = mean_and_error("BRISQUE", scores)
    note = "lower is better, whatever arrow the paper prints"
    if side < SMALL_SIDE:
        note += "; made for photographs: on images this small it scatters widely, compare equal sizes only"
    return Brisque(**mean, no_score=len(scores) - mean["images"], note=note)


@functools.cache
def _scorer() -> Any:
    """The package's BRISQUE with a fit that always ends in the range that the method defines.

    The package finds the shape of a generalised Gaussian by a root finder. It diverges where the data are
    flatter than any such Gaussian, as in many CIFAR images, and all of these then get the same score. The
    published method takes the nearest shape from 0.2 to 10.
    """
    base: Any = optional("brisque", "BRISQUE").BRISQUE
    special = optional("scipy.special", "BRISQUE")

    def ratio(shape: Any) -> Any:  # (E|x|)^2 / E[x^2]
        return special.gamma(2 / shape) ** 2 / (special.gamma(1 / shape) * special.gamma(3 / shape))

    shapes = np.linspace(0.2, 10, 9801)
    ratios = ratio(shapes)  # grows with the shape

    class Scorer(base):  # type: ignore[misc]
        def asymmetric_generalized_gaussian_fit(self, x: npt.NDArray[Any]) -> tuple[float, ...]:
            left, right = (np.sqrt(np.mean(np.square(part))) for part in (x[x < 0], x[x >= 0]))
            skew = left / right
            r = np.mean(np.abs(x)) ** 2 / np.mean(np.square(x))
            target = r * (skew**3 + 1) * (skew + 1) / (skew**2 + 1) ** 2
            shape = float(np.interp(target, ratios, shapes))
            scale = np.sqrt(special.gamma(1 / shape) / special.gamma(3 / shape))
            mean = (right - left) * scale * special.gamma(2 / shape) / special.gamma(1 / shape)
            return shape, mean, left, right

    return Scorer(url=False)


def _load(clip: str, device: torch.device) -> Score:
    _scorer()  # a missing package is reported before any work is done
    return brisque_scores


BRISQUE = Metric(
    name="brisque",
    help="how natural the pixels of each sample are, without a reference; lower is better",
    needs=("images",),
    packages=("brisque",),
    score=_load,
    rows=(("BRISQUE", "{value:.2f} ± {error:.2f}", "lower", "{images:,} samples"),),
    note="BRISQUE: {note}",
    result=lambda evidence: mean_brisque(evidence["samples"].scores["brisque"], evidence["samples"].side),
)
