"""Metrics of pictures, of whatever origin: each picture is drawn once and seen by all that judge it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jacobiflow.data.sources import Images
from jacobiflow_lab.metrics.brisque import brisque_scores, mean_brisque
from jacobiflow_lab.metrics.clip_iqa import ClipScorer, mean_clip_iqa
from jacobiflow_lab.metrics.fid import Collector, Moments, digest, fid_of, kid, load_moments, save_moments
from jacobiflow_lab.metrics.inception import Network, as_pixels, features, load_inception
from jacobiflow_lab.metrics.paired import paired_distance
from jacobiflow_lab.metrics.shares import Shares

OF_PICTURES = ("fid", "kid", "brisque", "clip-iqa", "paired")
Draw = Callable[[int, int], Tensor]  # (start, count): pictures [count, C, H, W] number start, start + 1, ...


@dataclass(frozen=True)
class Judges:
    """What looks at pictures: those that the metrics need, loaded."""

    metrics: frozenset[str]
    network: Network | None
    clip: ClipScorer | None

    @classmethod
    def of(
        cls, metrics: frozenset[str], network: Network | None, clip: str | None, device: torch.device
    ) -> Judges:
        """The judges of these metrics; what is missing is said here, before any work."""
        sees = bool(metrics & {"fid", "kid", "paired"})
        scorer = ClipScorer(clip, device) if "clip-iqa" in metrics else None
        if "brisque" in metrics:
            brisque_scores(torch.zeros(0, 1, 32, 32))
        return cls(metrics, (network or load_inception(device)) if sees else None, scorer)


@dataclass
class Seen:
    """What one process has seen."""

    features: Collector
    reference: Collector  # of the other decoder's pictures
    scores: dict[str, list[tuple[int, Tensor]]] = field(default_factory=dict)
    lost: int = 0  # pictures that are not finite
    side: int = 0

    def score(self, name: str, start: int, values: Tensor) -> None:
        self.scores.setdefault(name, []).append((start, values))


def measure_pictures(
    judges: Judges, draw: Draw, other: Draw | None, known: Moments | None, samples: int, shares: Shares
) -> dict[str, Any]:
    """The metrics of pictures 0 .. samples - 1, by their names in the report; the same on every process.

    other: the same pictures by another decoder, for `paired`. known: features of real ones, for fid and kid.
    """
    if not judges.metrics & set(OF_PICTURES):
        return {}
    seen = Seen(Collector(samples), Collector(samples))
    for index in shares.batches("samples", samples):
        _look(judges, draw, other if "paired" in judges.metrics else None, int(index[0]), len(index), seen)
    return _figures(judges, known, seen, shares)


def _look(judges: Judges, draw: Draw, other: Draw | None, start: int, count: int, seen: Seen) -> None:
    """Draw pictures start .. start + count - 1 and let everyone see them."""
    x, y = draw(start, count), None if other is None else other(start, count)
    good = _finite(x) if y is None else _finite(x) & _finite(y)
    pixels = as_pixels(x[good])
    seen.lost += count - len(pixels)
    seen.side = min(pixels.shape[2:])
    if judges.network is not None:
        seen.features.add(start, features(pixels, judges.network))
        if y is not None:
            seen.reference.add(start, features(as_pixels(y[good]), judges.network))
    if "brisque" in judges.metrics:
        seen.score("brisque", start, brisque_scores(pixels))
    if judges.clip is not None:
        seen.score("clip-iqa", start, judges.clip(pixels))


def _finite(x: Tensor) -> Tensor:
    return x.isfinite().flatten(1).all(1)


def _figures(judges: Judges, known: Moments | None, seen: Seen, shares: Shares) -> dict[str, Any]:
    """What all processes have seen, as figures; one of them computes, all get them."""
    world, metrics, net = shares.world, judges.metrics, judges.network
    parts = world.gather((seen.lost, seen.side), None)
    lost, side = sum(n for n, _ in parts), max(s for _, s in parts)
    fake = None if net is None else seen.features.moments(world)
    twin = seen.reference.moments(world) if "paired" in metrics else None
    scores = {
        name: shares.together(seen.scores.get(name, []))
        for name in ("brisque", "clip-iqa")
        if name in metrics
    }

    def compute() -> dict[str, Any]:
        found: dict[str, Any] = {"not_finite": lost}
        name = "" if net is None else net.version
        if known is not None and fake is not None and metrics & {"fid", "kid"}:
            if "fid" in metrics:
                found["fid"] = fid_of(known, fake, network=name)
            found["kid"] = kid(known, fake, network=name)  # beside every FID
        if twin is not None and fake is not None:
            found["paired"] = paired_distance(fake.features, twin.features, network=name)
        if "brisque" in scores:
            found["brisque"] = mean_brisque(scores["brisque"], side)
        if judges.clip is not None:
            found["clip_iqa"] = mean_clip_iqa(scores["clip-iqa"], judges.clip.clip)
        return found

    return world.share(compute)


def real_moments(
    images: Images, network: Network | None = None, *, shares: Shares | None = None, device: Any = "cpu"
) -> Moments:
    """Features of real images; computed once, then kept in the user's cache folder by their content."""
    net, shares = network or load_inception(device), shares or Shares()
    world = shares.world
    name = digest(images.pixels, net.version)
    held: Moments | None = world.share(lambda: load_moments(name))
    if held is not None:
        return held
    seen = Collector(len(images))
    for index in shares.batches("features of real images", len(images)):
        seen.add(int(index[0]), features(images.pixels[index].to(device), net))
    moments = seen.moments(world)
    if world.leader:
        save_moments(name, moments)
    return moments
