"""How samples are drawn, and what metrics keep of them.

Each sample is drawn once. Those that are not finite are left out of everything and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from jacobiflow.core.method import Plan
from jacobiflow.core.pictures import as_images
from jacobiflow.core.results import Decoded
from jacobiflow.core.rows import Noise
from jacobiflow.data.decoding import Images
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.jobs.sampling import labels_in_turn
from jacobiflow_lab.metrics.distributed_map import DistributedMap
from jacobiflow_lab.metrics.inception import Network, as_pixels, features, load_inception
from jacobiflow_lab.metrics.metric import Evidence, Metric, MetricError, Score
from jacobiflow_lab.metrics.moments import KEEP, Collector, Moments, stored_features

Draw = Callable[[int, int], Tensor]  # (start, count): images [count, C, H, W] number start, start + 1, ...
NO_IMAGES = Images(torch.empty(0, 1, 1, 1, dtype=torch.uint8))


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Numbered samples of a flow by a plan, and the real images beside them.

    The options are those of `jacobiflow_lab.metrics.evaluate`.
    """

    flow: Flow
    plan: Plan
    labels: Sequence[int] | Literal["all"] | None = "all"
    guidance: Guidance = field(default_factory=Guidance)
    denoise: bool = True
    seed: int = 0
    real: Images = NO_IMAGES
    noise: Noise = "dequantize"
    reference: Plan | None = None  # the plan that `paired` compares with
    names: tuple[str, str] = ("", "")  # of the plan and of the reference

    @property
    def label_cycle(self) -> list[int]:
        """The labels that samples take in turn; none: []."""
        return list(range(self.flow.num_classes)) if self.labels == "all" else list(map(int, self.labels or ()))

    @property
    def denoises(self) -> bool:
        """Whether there is noise of training to remove, and it is removed."""
        return self.denoise and self.flow.noise_std > 0

    def decode(self, start: int, count: int, *, check: bool = False) -> Decoded:
        """Samples from number `start` on; sample i depends on (seed, i) only."""
        z = self.flow.noise(count, self.seed, start=start)
        labels = labels_in_turn(self.label_cycle, range(start, start + count))
        # Samples that are not finite are reported later.
        return self.flow.decode(z, self.plan, labels=labels, guidance=self.guidance, check=check, warn=False)

    def __call__(self, start: int, count: int) -> Tensor:
        """Images from number `start` on, [count, C, H, W] in [-1, 1]; not all need be finite."""
        labels = labels_in_turn(self.label_cycle, range(start, start + count))
        return pictures(self.flow, self.decode(start, count).x, labels, denoise=self.denoise)

    def describe(self) -> dict[str, Any]:
        """The settings, for a report."""
        return {
            "plan": self.names[0],
            "labels": self.label_cycle,
            "guidance": asdict(self.guidance) if self.guidance.weight else 0.0,
            "denoise": self.denoises,
        }


def pictures(flow: Flow, x: Tensor, labels: Tensor | None, *, denoise: bool = True) -> Tensor:
    """Samples as images [N, C, H, W] in [-1, 1], without the noise of training if there was any."""
    images = as_images(flow.denoise(x, labels) if denoise and flow.noise_std else x)
    assert images is not None, "only flows of images are sampled as pictures"
    return images


@dataclass(frozen=True)
class Scorers:
    """What looks at images: the feature network and the scores of single images that the metrics need."""

    network: Network | None = None
    scores: dict[str, Score] = field(default_factory=dict)  # by metric
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def load(
        cls, metrics: Iterable[Metric], network: Network | None, clip: str | None, device: torch.device
    ) -> Scorers:
        """Those of these metrics; a missing package or CLIP is reported here, before any work is done."""
        metrics = list(metrics)
        scores = {m.name: m.score(clip or "", device) for m in metrics if m.score is not None}
        wanted = any("features" in m.needs for m in metrics)
        return cls((network or load_inception(device)) if wanted else None, scores, device)

    @property
    def version(self) -> str:
        """Of the feature network."""
        return "" if self.network is None else self.network.version


@dataclass(frozen=True, kw_only=True)
class SampleFeatures:
    """What is kept of samples: features and scores of the finite ones."""

    finite: Tensor  # [N], which samples are finite
    moments: Moments  # of the finite samples' features, in their order; empty if no metric needs them
    scores: dict[str, Tensor]  # by metric: of the finite samples among the first `scored`
    scored: int
    side: int  # pixels

    @property
    def count(self) -> int:
        """Samples that were drawn."""
        return len(self.finite)

    @property
    def not_finite(self) -> int:
        """Samples that were left out."""
        return int((~self.finite).sum())

    def first(self, n: int) -> SampleFeatures:
        """The features of the first n samples; the scores stay those that there are."""
        if n >= self.count:
            return self
        if n > KEEP:
            raise MetricError(f"features of the first {KEEP:,} samples are kept, not of {n:,}: draw again")
        finite = self.finite[:n]
        moments = Moments.of(self.moments.features[: int(finite.sum())])
        return SampleFeatures(finite=finite, moments=moments, scores=self.scores, scored=self.scored, side=self.side)

    def paired_features(self, other: SampleFeatures) -> tuple[Tensor, Tensor]:
        """Features of the samples that are finite here and there, [M, D] each; of the first KEEP samples."""
        both = (self.finite & other.finite)[:KEEP]
        mine, others = (x.moments.features[both[x.finite[:KEEP]]] for x in (self, other))
        return mine, others


def collect(
    draw: Draw,
    n: int,
    scorers: Scorers,
    work: DistributedMap | None = None,
    *,
    scored: int | None = None,
    what: str = "samples",
    stored: bool = False,
) -> SampleFeatures:
    """Draw samples 0 .. n - 1 in batches and keep what the scorers see; the same on every process.

    scored: how many samples, from the first on, get scores. Default: all. what: the name of the progress.
    stored: keep the features of each batch in the user's cache folder, so that an interrupted run resumes.
    """
    work, scored, side = work or DistributedMap(), n if scored is None else scored, 0
    collector = Collector(n)
    finite: list[tuple[int, Tensor]] = []
    scores: dict[str, list[tuple[int, Tensor]]] = {name: [] for name in scorers.scores}
    for index in work.batches(what, n):
        start = int(index[0])
        x = draw(start, len(index))
        good = x.isfinite().flatten(1).all(1)
        pixels, side = as_pixels(x[good]), min(x.shape[2:])
        finite.append((start, good.cpu()))
        if scorers.network is not None:
            look = stored_features if stored and len(pixels) else features
            collector.add(start, look(pixels, scorers.network))
        few = pixels[: int(good[: max(scored - start, 0)].sum())]
        for name, score in scorers.scores.items():
            if len(few):
                scores[name].append((start, score(few)))
    return SampleFeatures(
        finite=work.gather(finite),
        moments=collector.moments(work.world),
        scores={name: work.gather(values) for name, values in scores.items()},
        scored=scored,
        side=max(work.world.gather(side, None)),
    )


def results(metrics: Iterable[Metric], evidence: Evidence) -> dict[str, Any]:
    """The results by name; `evaluate` and `reproduce` both compute them here, from what `collect` kept."""
    return {metric.name: metric.result(evidence) for metric in metrics}
