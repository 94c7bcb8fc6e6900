"""The paired distance: what two decoders make of the same noise, seen by the Inception network.

FID asks whether two crowds look alike, and at small counts its own scatter hides what a decoder costs. Here
each sample is its own reference, so that a difference shows from a few samples on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jacobiflow_lab.metrics.errors import MetricError

SPREAD = 2000  # features whose mutual distances are looked at


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Distances of features of the same samples by two decoders; 0: they agree to the last pixel."""

    value: float  # mean L2 distance of the two features of a sample
    error: float  # its standard error
    largest: float
    spread: float  # mean L2 distance of different samples of the reference
    relative: float  # value / spread: 1 would be samples that have nothing to do with each other
    samples: int
    network: str = ""


def paired_distance(features: Tensor, reference: Tensor, *, network: str = "") -> Paired:
    """Of features [N, D] and [N, D]: row i of both comes from the same noise.

    >>> a = torch.tensor([[0.0, 0.0], [0.0, 4.0]])
    >>> found = paired_distance(a + torch.tensor([1.0, 0.0]), a)
    >>> found.value, found.spread, found.relative
    (1.0, 4.0, 0.25)
    """
    if features.shape != reference.shape or features.ndim != 2 or len(features) < 2:
        raise MetricError(
            f"paired features are two [N, D] with N of 2 or more, not {list(features.shape)} and "
            f"{list(reference.shape)}"
        )
    apart = (features.double() - reference.double()).norm(dim=1)
    spread = float(torch.pdist(reference[:SPREAD].double()).mean())
    value, n = float(apart.mean()), len(apart)
    return Paired(
        value=value,
        error=float(apart.std() / n**0.5),
        largest=float(apart.max()),
        spread=spread,
        relative=value / spread if spread else float(value > 0),
        samples=n,
        network=network,
    )
