"""BRISQUE: how natural the pixels of an image are, without a reference (Mittal et al., 2012).

Lower is better: the score is a predicted loss of quality, whatever arrow the paper prints beside it. The
trained regression is that of the package brisque. The method looks at statistics of 7 x 7 neighbourhoods at
full and at half size, and was trained on photographs of several hundred pixels. On 28 or 32 pixels it works,
but scores scatter widely (they leave the usual 0 to 100 on both sides), drawings such as MNIST's digits are
far from all it knows, and images of one colour have no score. Means over many images of one size compare
decoders of one model, and nothing else.
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

from jacobiflow_lab.metrics.errors import MetricError, optional
from jacobiflow_lab.metrics.inception import as_pixels

SMALLEST = 16  # pixels a side: its half still holds a neighbourhood
NOTE = "lower is better, whatever arrow the paper prints"
SMALL = (
    "; made for photographs: on images this small it scatters widely, so compare means of equal sizes only"
)


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
    if min(pixels.shape[2:]) < SMALLEST:
        raise MetricError(
            f"BRISQUE needs images of {SMALLEST} pixels a side or more, not {list(pixels.shape[2:])}"
        )
    rows = pixels.expand(-1, 3, -1, -1).permute(0, 2, 3, 1).cpu().numpy()
    judge = _judge()
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # images without a score say so by their NaN
        return torch.tensor([float(judge.score(row)) for row in rows], dtype=torch.float64)


def mean_brisque(scores: Tensor, side: int) -> Brisque:
    """Over images of `side` pixels, of their scores [N]."""
    kept = scores[scores.isfinite()]
    if len(kept) < 2:
        raise MetricError(f"BRISQUE: {len(kept)} of {len(scores)} images have a score, 2 are needed")
    return Brisque(
        value=float(kept.mean()),
        error=float(kept.std() / len(kept) ** 0.5),
        images=len(kept),
        no_score=len(scores) - len(kept),
        note=NOTE + (SMALL if side < 128 else ""),
    )


@functools.cache
def _judge() -> Any:
    """The package's BRISQUE with a fit that always ends in the range that the method defines.

    The package looks for the shape of a generalised Gaussian by a root finder that runs away where the data
    are flatter than any such Gaussian, as in many CIFAR images, and then gives the same score to all of them.
    The method as published takes the nearest shape from 0.2 to 10.
    """
    base: Any = optional("brisque", "BRISQUE").BRISQUE
    special = optional("scipy.special", "BRISQUE")

    def ratio(shape: Any) -> Any:  # (E|x|)^2 / E[x^2]
        return special.gamma(2 / shape) ** 2 / (special.gamma(1 / shape) * special.gamma(3 / shape))

    shapes = np.linspace(0.2, 10, 9801)
    ratios = ratio(shapes)  # grows with the shape

    class Judge(base):  # type: ignore[misc]
        def asymmetric_generalized_gaussian_fit(self, x: npt.NDArray[Any]) -> tuple[float, ...]:
            left, right = (np.sqrt(np.mean(np.square(part))) for part in (x[x < 0], x[x >= 0]))
            skew = left / right
            r = np.mean(np.abs(x)) ** 2 / np.mean(np.square(x))
            target = r * (skew**3 + 1) * (skew + 1) / (skew**2 + 1) ** 2
            shape = float(np.interp(target, ratios, shapes))
            scale = np.sqrt(special.gamma(1 / shape) / special.gamma(3 / shape))
            mean = (right - left) * scale * special.gamma(2 / shape) / special.gamma(1 / shape)
            return shape, mean, left, right

    return Judge(url=False)
