"""One entry to the metrics: samples are drawn once, in batches, by one process or many."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import jacobiflow
from jacobiflow.core.method import Plan
from jacobiflow.core.processes import World
from jacobiflow.core.rows import Noise
from jacobiflow.data.decoding import Images
from jacobiflow.flows.checks import PROBES, warn_if_loose
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow_lab.metrics.distributed_map import DistributedMap, Progress
from jacobiflow_lab.metrics.inception import Network
from jacobiflow_lab.metrics.likelihood import noise_of
from jacobiflow_lab.metrics.metric import Evidence, Metric, MetricError
from jacobiflow_lab.metrics.moments import real_moments
from jacobiflow_lab.metrics.registry import METRICS, check_request, select
from jacobiflow_lab.metrics.samples import NO_IMAGES, Draw, Sampling, Scorers, collect, results

IMAGE_NEEDS = {"images", "features", "reference"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured. A result is an attribute too: `report.clip_iqa`, None if it was not measured."""

    results: dict[str, Any]  # by metric
    samples: int
    not_finite: int = 0  # samples that are not finite; they are left out of everything
    seed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if (metric := name.replace("_", "-")) not in METRICS:
            raise AttributeError(f"no metric is called {metric!r}: there are {', '.join(METRICS)}")
        return self.results.get(metric)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `results` has one table per metric."""
        results = {name: METRICS[name].to_dict(result) for name, result in self.results.items()}
        return vars(self) | {"results": results}


def evaluate(
    flow: Flow,
    data: Images | None = None,
    *,
    metrics: Sequence[str] = ("fid", "kid"),
    samples: int = 1000,
    plan: str | Plan | None = None,
    reference_plan: str | Plan = "sequential",
    tol: float | None = None,
    max_deviation: float | None = None,
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
    """Measure samples of a flow, and the likelihood and reconstruction of real images.

    data: real images, for metrics that need them. real: how many of them, a random choice that is always the
        same. Default: as many as samples.
    plan, tol, max_deviation, guidance: see `Flow.decode`. reference_plan: the decoder that `paired` compares with.
    labels: that samples take in turn. "all": every class of the flow. None: no labels, and the labels of the
        data are not used either.
    denoise: remove the noise of training from samples, if the flow was trained with Gaussian noise.
    noise: what is added to images for bpd. Default: as the flow was trained.
    seed: sample i depends on (seed, i) only.
    network: another network than the FID Inception. clip: a path or hub id, for clip-iqa.
    world: many processes share the work by index, and each returns the same report.
    """
    if flow.image_shape is None and _needs(select(metrics), *IMAGE_NEEDS):
        names = ", ".join(name for name, metric in METRICS.items() if not _needs([metric], *IMAGE_NEEDS))
        raise MetricError(f"samples of shape {list(flow.data_shape)} are not images: use {names}")
    guide, world = Guidance.of(guidance), world or World()
    plan = default_plan(tol) if plan is None else plan
    sampling = Sampling(
        flow=flow,
        plan=_resolve(flow, plan, tol, batch, guide, world, max_deviation),
        reference=_resolve(flow, reference_plan, None, batch, guide, world),
        names=(_plan_name(plan), _plan_name(reference_plan)),
        labels=labels,
        guidance=guide,
        denoise=denoise,
        seed=seed,
        noise=noise or noise_of(flow),
    )
    if tol is not None and world.leader:
        residual = sampling.decode(0, PROBES, check=True).stats.residual
        assert residual is not None
        warn_if_loose(tol, residual)
    report = evaluate_pictures(
        sampling,
        data,
        metrics=metrics,
        samples=samples,
        seed=seed,
        batch=batch,
        real=real,
        network=network,
        clip=clip,
        device=next(flow.parameters()).device,
        world=world,
        progress=progress,
    )
    return replace(
        report, settings=sampling.describe() | {"tol": tol, "max_deviation": max_deviation} | report.settings
    )


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
    """Measure images of any origin: draw(start, count) gives [count, C, H, W] in [-1, 1] or uint8.

    A plain function has the metrics that need images alone, a `Sampling` has all. The other options are as in
    `evaluate`.
    """
    check_request(metrics, data, clip, samples=samples, real=real)
    chosen, sampling = select(metrics), draw if isinstance(draw, Sampling) else None
    if sampling is None and (wrong := [m.name for m in chosen if _needs([m], "flow", "reference")]):
        names = ", ".join(name for name, m in METRICS.items() if not _needs([m], "flow", "reference"))
        raise MetricError(f"{wrong[0]} needs a flow: images alone have {names}")
    work = DistributedMap(batch=batch, world=world or World(), progress=progress)
    scorers = Scorers.load(chosen, network, clip, torch.device(device))
    known = choose(data, real or samples, labelled=sampling is not None and bool(sampling.label_cycle))
    evidence, settings = Evidence(network=scorers.version, clip=clip or ""), {}
    if any(_needs([m], "features") and _needs([m], "real") for m in chosen):
        evidence["real"] = real_moments(known, scorers.network, work=work, device=scorers.device)
    if _needs(chosen, *IMAGE_NEEDS):
        evidence["samples"] = collect(draw, samples, scorers, work)
    if sampling is not None:
        sampling = evidence["sampling"] = replace(sampling, real=known)
        evidence["values"] = _values(chosen, sampling, samples, work)
    if sampling is not None and sampling.reference is not None and _needs(chosen, "reference"):
        twin, features_alone = replace(sampling, plan=sampling.reference), replace(scorers, scores={})
        evidence["reference"] = collect(twin, samples, features_alone, work, what="reference samples")
        settings["reference_plan"] = evidence["reference_plan"] = sampling.names[1]
    return Report(
        results=work.world.share(lambda: results(chosen, evidence)),
        samples=samples,
        not_finite=evidence["samples"].not_finite if "samples" in evidence else 0,
        seed=seed,
        settings=settings | {"batch": batch, "processes": work.world.size},
        versions=versions(chosen),
    )


def _values(metrics: list[Metric], sampling: Sampling, samples: int, work: DistributedMap) -> dict[str, Tensor]:
    """By metric: the numbers of each real image, or of each sample."""
    values = {}
    for metric in metrics:
        if metric.each is not None:
            count = len(sampling.real) if _needs([metric], "real") else samples
            values[metric.name] = work.map(metric.name, count, partial(metric.each, sampling))
    return values


def _needs(metrics: list[Metric], *needs: str) -> bool:
    """Whether any of the metrics needs any of these."""
    return any(need in metric.needs for metric in metrics for need in needs)


def versions(metrics: list[Metric]) -> dict[str, str]:
    """Of every package that the results depend on."""
    names = sorted({name for metric in metrics for name in metric.packages})
    known = {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__}
    return known | {name: importlib.metadata.version(name) for name in names}


def choose(data: Images | None, count: int, *, labelled: bool) -> Images:
    """At most `count` images, the same ones for the same data; folders are often sorted by class."""
    if data is None:
        return NO_IMAGES
    index = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
    return Images(data.pixels[index], data.labels[index] if labelled and data.labels is not None else None)


def _resolve(
    flow: Flow,
    plan: str | Plan,
    tol: float | None,
    batch: int,
    guidance: Guidance,
    world: World,
    bound: float | None = None,
) -> Plan:
    """The plan of this name; "auto" is chosen by one process and used by all."""
    if plan != "auto":
        return flow.plan(plan, tol=tol, max_deviation=bound)
    return world.share(lambda: flow.plan("auto", tol=tol, max_deviation=bound, n=batch, guidance=guidance))


def default_plan(tol: float | None) -> str:
    """The plan where none is given, as in `Flow.sample`."""
    return "auto" if tol is None else "selective"


def _plan_name(plan: str | Plan) -> str:
    return plan if isinstance(plan, str) else plan.to_json()
