"""FID and KID: how far the features of two sets of images are from each other."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from jacobiflow.core.cache_folder import own_folder, read_own, write_own
from jacobiflow.core.processes import World
from jacobiflow_lab.metrics.errors import MetricError, optional

KEEP = 10_000  # features that KID draws its subsets from
SUBSETS, SUBSET_SIZE = 100, 1000  # of KID, where there are as many images
BIAS = (
    "FID is biased upwards by an amount that depends on the model and on the counts ({fake:,} samples, "
    "{real:,} real images): compare only FIDs of equal counts; KID has no such bias"
)


@dataclass(frozen=True, kw_only=True)
class FID:
    """The Frechet distance of `samples` images from `real` ones; lower is better."""

    value: float
    samples: int
    real: int
    network: str

    @property
    def note(self) -> str:
        """What has to be said wherever the value is shown."""
        return BIAS.format(fake=self.samples, real=self.real)


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


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What is left of features that went by: the first KEEP of them, and float64 sums if there were more.

    >>> seen = Moments.of(torch.tensor([[1.0], [2.0], [6.0]]))
    >>> seen.count, seen.mean.tolist(), seen.cov.tolist()
    (3, [3.0], [[7.0]])
    """

    count: int
    features: Tensor  # [min(count, KEEP), D], in the order of the images
    total: Tensor | None = None  # sum f, [D]
    products: Tensor | None = None  # sum f f', [D, D]

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Of features [N, D]."""
        seen = Collector(len(features))
        seen.add(0, features)
        return seen.moments(World())

    @property
    def size(self) -> int:
        """Numbers a feature vector has."""
        return self.features.shape[1]

    @property
    def mean(self) -> Tensor:
        """[D] in float64."""
        return self.features.double().mean(0) if self.total is None else self.total / self.count

    @property
    def cov(self) -> Tensor:
        """[D, D] in float64, with N - 1 below the line."""
        if self.total is None or self.products is None:
            rows = self.features.double() - self.mean
            return rows.T @ rows / (self.count - 1)
        return (self.products - torch.outer(self.total, self.total) / self.count) / (self.count - 1)


class Collector:
    """Takes in features as they come, in bounded memory, on one of many processes."""

    def __init__(self, expected: int) -> None:
        self.summed = expected > KEEP  # else the features themselves say all
        self.count = 0
        self.kept: list[tuple[int, Tensor]] = []
        self.total: Tensor | None = None
        self.products: Tensor | None = None

    def add(self, start: int, features: Tensor) -> None:
        """Features [n, D] of images start, start + 1, ...; every image comes once, in any order."""
        if features.ndim != 2:
            raise MetricError(f"features must be [N, D], not {list(features.shape)}")
        self.count += len(features)
        if start < KEEP:
            self.kept.append((start, features[: KEEP - start].float()))
        if self.summed:
            total, products = _sums(features)
            self.total = total if self.total is None else self.total + total
            self.products = products if self.products is None else self.products + products

    def moments(self, world: World, group: Any = None) -> Moments:
        """Of all processes' features; each of them must ask, and the group is that of `world.gather`."""
        parts = world.gather((self.count, self.kept), group)
        count, kept = sum(n for n, _ in parts), [pair for _, some in parts for pair in some]
        features = torch.cat(
            [rows for _, rows in sorted(kept, key=lambda pair: pair[0])] or [torch.empty(0, 0)]
        )
        if not self.summed:
            return Moments(count=count, features=features)
        size = features.shape[1]
        zero = torch.zeros(size, dtype=torch.float64)
        total = zero if self.total is None else self.total
        products = torch.zeros(size, size, dtype=torch.float64) if self.products is None else self.products
        return Moments(
            count=count,
            features=features,
            total=world.mean(total) * world.size,
            products=world.mean(products) * world.size,
        )


def _sums(features: Tensor) -> tuple[Tensor, Tensor]:
    rows = features.double()
    return rows.sum(0), rows.T @ rows


def fid_of(real: Tensor | Moments, fake: Tensor | Moments, *, network: str = "") -> FID:
    """The Frechet distance of two sets of features [N, D], or of what is left of them."""
    a, b = (x if isinstance(x, Moments) else Moments.of(x) for x in (real, fake))
    if a.size != b.size:
        raise MetricError(f"features of {a.size} and of {b.size} numbers cannot be compared")
    if min(a.count, b.count) < 2:
        raise MetricError(f"FID needs 2 images or more of each kind, not {a.count} and {b.count}")
    if max(a.count, b.count) <= min(a.size, KEEP):
        value = _frechet_rows(a.features.double(), b.features.double())
    else:
        value = frechet(a.mean, a.cov, b.mean, b.cov)
    return FID(value=value, samples=b.count, real=a.count, network=network)


def frechet(mu1: Tensor, cov1: Tensor, mu2: Tensor, cov2: Tensor) -> float:
    """|mu1 - mu2|^2 + tr(cov1 + cov2 - 2 (cov1 cov2)^(1/2)), the squared W2 distance of two Gaussians.

    (cov1 cov2)^(1/2) has the trace of (r cov2 r)^(1/2) with r the root of cov1: that matrix is symmetric, so
    its eigenvalues are real and quick to find. All in float64.

    >>> frechet(torch.zeros(2), torch.eye(2), torch.tensor([3.0, 4.0]), 4 * torch.eye(2))  # 25 + 2 (1 - 2)^2
    27.0
    """
    mu1, cov1, mu2, cov2 = (x.double() for x in (mu1, cov1, mu2, cov2))
    values, vectors = torch.linalg.eigh(cov1)
    half = vectors * values.clamp_min(0).sqrt()  # half half' = cov1
    cross = torch.linalg.eigvalsh(half.T @ cov2 @ half).clamp_min(0).sqrt().sum()
    return float((mu1 - mu2).square().sum() + cov1.trace() + cov2.trace() - 2 * cross)


def _frechet_rows(a: Tensor, b: Tensor) -> float:
    """`frechet` of the moments of features, fewer than they have numbers: covariances A'A and B'B.

    tr (A'A B'B)^(1/2) is the sum of the singular values of A B', which is small.
    """
    far = (a.mean(0) - b.mean(0)).square().sum()
    a, b = ((x - x.mean(0)) / (len(x) - 1) ** 0.5 for x in (a, b))
    return float(far + a.square().sum() + b.square().sum() - 2 * torch.linalg.svdvals(a @ b.T).sum())


class _Given(nn.Module):
    """What torchmetrics asks for a network where features are there already."""

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

    Subsets of `subset_size` images of each kind (None: 1000, or half of what there is if that is less) are
    drawn `subsets` times by `seed`. Of features as `Moments` the first KEEP are used.
    """
    a, b = (x.features if isinstance(x, Moments) else x for x in (real, fake))
    counts = [x.count if isinstance(x, Moments) else len(x) for x in (real, fake)]
    least = min(len(a), len(b))
    size = subset_size or min(SUBSET_SIZE, max(2, least // 2))
    if subsets < 1 or not 2 <= size <= least:
        raise MetricError(
            f"KID needs subsets of 2 images or more of the {least} that there are, not {subsets} of {size}"
        )
    module = optional("torchmetrics.image.kid", "KID")
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # that features are kept: there are at most KEEP
        torch.manual_seed(seed)
        metric = module.KernelInceptionDistance(
            _Given(a.shape[1]),
            subsets=subsets,
            subset_size=size,
            sync_on_compute=False,  # it would wait for other processes, and one alone computes
        )
        metric.set_dtype(torch.float64)
        metric.update(a.double(), real=True)
        metric.update(b.double(), real=False)
        mean, std = metric.compute()
    return KID(
        value=float(mean),
        std=float(std),
        subsets=subsets,
        subset_size=size,
        samples=counts[1],
        real=counts[0],
        network=network,
    )


# Statistics of real images, kept between runs


def digest(pixels: Tensor, network: str) -> str:
    """A name for these very pixels seen by this very network."""
    rows = pixels.cpu().contiguous()
    head = f"{network} {rows.dtype} {list(rows.shape)}\n".encode()
    return hashlib.sha256(head + rows.numpy().tobytes()).hexdigest()


def _path(name: str) -> Path | None:
    folder = own_folder("features")
    return folder and folder / f"{name}.safetensors"


def load_moments(name: str) -> Moments | None:
    """The statistics kept under this name; None if there are none, or none that can be used."""
    path = _path(name)
    if path is None:
        return None
    try:
        held = load(read_own(path))
        found = Moments(
            count=int(held["count"]),
            features=held["features"],
            total=held.get("total"),
            products=held.get("products"),
        )
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    rows = found.features
    if rows.ndim != 2 or min(KEEP, found.count) != len(rows) or not bool(rows.isfinite().all()):
        return None
    sums = (
        None if found.total is None or found.products is None else (found.total.shape, found.products.shape)
    )
    return found if sums == (((found.size,), (found.size,) * 2) if found.count > KEEP else None) else None


def save_moments(name: str, moments: Moments) -> None:
    """Keep statistics for the next run; a folder that cannot be written to is no reason to fail."""
    held = {"features": moments.features.contiguous(), "count": torch.tensor(moments.count)}
    if moments.total is not None and moments.products is not None:
        held |= {"total": moments.total, "products": moments.products}
    path = _path(name)
    if path is None:
        return
    try:
        write_own(path, save(held))
    except OSError as error:
        warnings.warn(
            f"statistics of real images are not kept in {path.parent}: {error.strerror}", stacklevel=2
        )
