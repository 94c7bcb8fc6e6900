"""What is left of an image after encoding and decoding, and of noise after decoding and encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.metrics.errors import MetricError


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Of real images x in [-1, 1] (or wherever the flow's data lives) and decode(encode(x).z)."""

    mse: float  # the mean squared difference, the paper's error
    mean: float  # of |decode(encode(x)) - x|
    largest: float
    images: int
    not_finite: int = 0  # images without a finite answer; they are left out


@dataclass(frozen=True, kw_only=True)
class Invertibility:
    """Of samples: |encode(decode(z)) - z|, the largest number of each sample."""

    mean: float  # over samples
    largest: float
    samples: int
    not_finite: int = 0


@torch.no_grad()
def reconstruct(flow: Flow, x: Tensor, plan: str | Plan = "selective", **given: Any) -> Tensor:
    """decode(encode(x).z).x by `plan`; `given` are labels or context, and options of `decode`."""
    condition = {k: v for k, v in given.items() if k in ("labels", "context")}
    return flow.decode(flow.encode(x, **condition).z, plan, warn=False, **given).x


def errors(x: Tensor, again: Tensor) -> Tensor:
    """[N, 3]: mean squared, mean absolute and largest absolute difference of each image, in float64."""
    apart = (again.double() - x.double()).flatten(1)
    return torch.stack((apart.square().mean(1), apart.abs().mean(1), apart.abs().amax(1)), 1).cpu()


def reconstruction(found: Tensor) -> Reconstruction:
    """Over all images, of their `errors` [N, 3]."""
    kept = found[found.isfinite().all(1)]
    if not len(kept):
        raise MetricError(f"reconstruction: none of {len(found)} images has a finite answer")
    return Reconstruction(
        mse=float(kept[:, 0].mean()),
        mean=float(kept[:, 1].mean()),
        largest=float(kept[:, 2].max()),
        images=len(kept),
        not_finite=len(found) - len(kept),
    )


def invertibility(residual: Tensor) -> Invertibility:
    """Of `stats.residual` [N] of samples that were decoded with check=True."""
    kept = residual[residual.isfinite()].double()
    if not len(kept):
        raise MetricError(f"invertibility: none of {len(residual)} samples has a finite answer")
    return Invertibility(
        mean=float(kept.mean()),
        largest=float(kept.max()),
        samples=len(kept),
        not_finite=len(residual) - len(kept),
    )
