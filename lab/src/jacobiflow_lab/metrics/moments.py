"""Features of many images in bounded memory, kept between runs."""

from __future__ import annotations

import functools
import hashlib
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from jacobiflow.core.files import own_folder, read_own, write_own
from jacobiflow.core.processes import World
from jacobiflow.data.decoding import Images
from jacobiflow_lab.metrics.distributed_map import DistributedMap
from jacobiflow_lab.metrics.inception import Network, features, load_inception
from jacobiflow_lab.metrics.metric import MetricError

KEEP = 10_000  # features that are kept as they are; KID draws its subsets from them


@dataclass(frozen=True, kw_only=True)
class Moments:
    """What is kept of the features of many images: those of the first KEEP, and float64 sums of all.

    >>> moments = Moments.of(torch.tensor([[1.0], [2.0], [6.0]]))
    >>> moments.count, moments.mean.tolist(), moments.cov.tolist()
    (3, [3.0], [[7.0]])
    """

    count: int
    features: Tensor  # [min(count, KEEP), D], in the order of the images
    total: Tensor | None = None  # sum f, [D]; None where `features` are all there are
    products: Tensor | None = None  # sum f f', [D, D]

    @classmethod
    def of(cls, features: Tensor) -> Moments:
        """Of features [N, D]."""
        collector = Collector(len(features))
        collector.add(0, features)
        return collector.moments(World())

    @property
    def size(self) -> int:
        """Length D of a feature vector."""
        return self.features.shape[1]

    @property
    def mean(self) -> Tensor:
        """[D] in float64."""
        return self.features.double().mean(0) if self.total is None else self.total / self.count

    @property
    def cov(self) -> Tensor:
        """[D, D] in float64, divided by N - 1."""
        if self.total is None or self.products is None:
            rows = self.features.double() - self.mean
            return rows.T @ rows / (self.count - 1)
        return (self.products - torch.outer(self.total, self.total) / self.count) / (self.count - 1)

    @functools.cached_property
    def root(self) -> Tensor:
        """[D, D] in float64: root root' is the covariance. It takes seconds and is computed once."""
        return root(self.cov)


def root(cov: Tensor) -> Tensor:
    """A matrix whose product with its transpose is `cov`, in float64."""
    values, vectors = torch.linalg.eigh(cov.double())
    return vectors * values.clamp_min(0).sqrt()  # type: ignore[no-any-return]


class Collector:
    """Takes in features as they come, in bounded memory, on one of many processes."""

    def __init__(self, expected: int) -> None:
        self.summed = expected > KEEP
        self.count = 0
        self.kept: list[tuple[int, Tensor]] = []
        self.total: Tensor | float = 0.0
        self.products: Tensor | float = 0.0

    def add(self, start: int, features: Tensor) -> None:
        """Features [n, D] of images from number `start` on; every image comes once, in any order."""
        if features.ndim != 2:
            raise MetricError(f"features must be [N, D], not {list(features.shape)}")
        self.count += len(features)
        if start < KEEP:
            self.kept.append((start, features[: KEEP - start].float()))
        if self.summed:
            rows = features.double()
            self.total, self.products = self.total + rows.sum(0), self.products + rows.T @ rows

    def moments(self, world: World, group: Any = None) -> Moments:
        """Of the features of all processes; each of them must call this. group: see `World.gather`."""
        parts = world.gather((self.count, self.kept), group)
        count = sum(n for n, _ in parts)
        kept = sorted((pair for _, pairs in parts for pair in pairs), key=lambda pair: pair[0])
        features = torch.cat([rows for _, rows in kept] or [torch.empty(0, 0)])
        if not self.summed:
            return Moments(count=count, features=features)
        zero = torch.zeros(features.shape[1], dtype=torch.float64)  # of a process without images
        total, products = zero + self.total, torch.outer(zero, zero) + self.products
        sums = [world.mean(x) * world.size for x in (total, products)]
        return Moments(count=count, features=features, total=sums[0], products=sums[1])


def real_moments(
    images: Images, network: Network | None = None, *, work: DistributedMap | None = None, device: Any = "cpu"
) -> Moments:
    """Features of real images, computed once and then kept in the user's cache folder by their content."""
    network, work = network or load_inception(device), work or DistributedMap()
    name = digest(images.pixels, network.version)
    stored: Moments | None = work.world.share(lambda: load_moments(name))
    if stored is not None:
        return stored
    collector = Collector(len(images))
    for index in work.batches("features of real images", len(images)):
        collector.add(int(index[0]), features(images.pixels[index].to(device), network))
    moments = collector.moments(work.world)
    if work.world.leader:
        save_moments(name, moments)
    return moments


def stored_features(pixels: Tensor, network: Network) -> Tensor:
    """Features [N, D] of images, computed once and then kept in the user's cache folder by their content.

    Batches that are always cut alike, such as those of a fixed seed, can so be computed over several days.
    """
    name = digest(pixels, network.version)
    stored = load_moments(name)
    if stored is None:
        stored = Moments.of(features(pixels, network))
        save_moments(name, stored)
    return stored.features


def digest(pixels: Tensor, network: str) -> str:
    """A name for exactly these pixels and this network."""
    rows = pixels.cpu().contiguous()
    head = f"{network} {rows.dtype} {list(rows.shape)}\n".encode()
    return hashlib.sha256(head + rows.numpy().tobytes()).hexdigest()


def _path(name: str) -> Path | None:
    folder = own_folder("features")
    return folder and folder / f"{name}.safetensors"


def load_moments(name: str) -> Moments | None:
    """The moments stored under this name; None if there are none, or if they are damaged."""
    if (path := _path(name)) is None:
        return None
    try:
        stored = load(read_own(path))
        total, products = stored.get("total"), stored.get("products")
        moments = Moments(count=int(stored["count"]), features=stored["features"], total=total, products=products)
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    rows = moments.features
    if rows.ndim != 2 or min(KEEP, moments.count) != len(rows) or not bool(rows.isfinite().all()):
        return None
    size, shapes = moments.size, [None if t is None else tuple(t.shape) for t in (total, products)]
    return moments if shapes == ([(size,), (size, size)] if moments.count > KEEP else [None, None]) else None


def save_moments(name: str, moments: Moments) -> None:
    """Store moments for the next run; a folder that cannot be written to gives a warning."""
    stored = {"features": moments.features.contiguous(), "count": torch.tensor(moments.count)}
    if moments.total is not None and moments.products is not None:
        stored |= {"total": moments.total, "products": moments.products}
    if (path := _path(name)) is None:
        return
    try:
        write_own(path, save(stored))
    except OSError as error:
        text = f"features of images cannot be stored in {path.parent}: {error.strerror}"
        warnings.warn(text, stacklevel=2)
