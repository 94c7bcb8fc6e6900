"""How well images survive encoding and decoding, and noise decoding and encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.method import Plan
from jacobiflow.data.decoding import Images
from jacobiflow.data.transforms import prepare
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.metrics.metric import Metric, MetricError
from jacobiflow_lab.metrics.samples import Sampling


@dataclass(frozen=True, kw_only=True)
class Reconstruction:
    """Differences of decode(encode(x).z) from real images x, in the units of the flow's data."""

    mse: float  # mean squared difference, the paper's error
    mse_error: float  # its standard error over images; 0 for one image
    mean: float  # mean absolute difference
    largest: float
    images: int
    not_finite: int = 0  # images without a finite reconstruction; they are left out


@dataclass(frozen=True, kw_only=True)
class Invertibility:
    """Of samples: the largest element of |encode(decode(z)) - z| per sample."""

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


def reconstruction(values: Tensor) -> Reconstruction:
    """Over all images, of their `errors` [N, 3]."""
    kept = values[values.isfinite().all(1)]
    if not len(kept):
        raise MetricError(f"reconstruction: none of {len(values)} images has a finite reconstruction")
    mse, mean, _ = kept.mean(0).tolist()
    error = float(kept[:, 0].std() / len(kept) ** 0.5) if len(kept) > 1 else 0.0
    largest, lost = float(kept[:, 2].max()), len(values) - len(kept)
    return Reconstruction(mse=mse, mse_error=error, mean=mean, largest=largest, images=len(kept), not_finite=lost)


def invertibility(residual: Tensor) -> Invertibility:
    """Of `stats.residual` [N] of samples that were decoded with check=True."""
    kept = residual[residual.isfinite()].double()
    if not len(kept):
        raise MetricError(f"invertibility: none of {len(residual)} samples is finite")
    mean, largest, lost = float(kept.mean()), float(kept.max()), len(residual) - len(kept)
    return Invertibility(mean=mean, largest=largest, samples=len(kept), not_finite=lost)


def reconstructed(flow: Flow, images: Images, index: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """The images `index` as data of the flow, and their reconstructions."""
    x = prepare(images, index, torch.Generator()).x.reshape(-1, *flow.data_shape).to(next(flow.parameters()))
    labels = None if images.labels is None else images.labels[index]
    return x, reconstruct(flow, x, plan, labels=labels)


def _errors(sampling: Sampling, index: Tensor) -> Tensor:
    return errors(*reconstructed(sampling.flow, sampling.real, index, sampling.plan))


def _residual(sampling: Sampling, index: Tensor) -> Tensor:
    residual = sampling.decode(int(index[0]), len(index), check=True).stats.residual
    assert residual is not None
    return residual.cpu()


RECONSTRUCTION = Metric(
    name="reconstruction",
    help="mean squared and largest error of decode(encode(x)) of real images; lower is better",
    needs=("flow", "real"),
    brings=("invertibility",),
    each=_errors,
    rows=(
        ("reconstruction, mean square", "{mse:.3g}", "lower", "{images:,} real"),
        ("reconstruction, largest", "{largest:.3g}", "lower", "{images:,} real"),
    ),
    result=lambda evidence: reconstruction(evidence["values"]["reconstruction"]),
)
INVERTIBILITY = Metric(
    name="invertibility",
    help="|encode(decode(z)) - z| of samples; lower is better",
    needs=("flow",),
    each=_residual,
    rows=(("|encode(decode(z)) - z|", "{mean:.3g}", "lower", "{samples:,} samples"),),
    result=lambda evidence: invertibility(evidence["values"]["invertibility"]),
)
