"""How good the samples of a plan are, by the metrics of the paper's Table 1 and two that it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.core.processes import World
from jacobiflow_lab.metrics import (
    ClipScorer,
    Moments,
    brisque_scores,
    features,
    fid_of,
    kid,
    load_inception,
    mean_brisque,
    mean_clip_iqa,
    paired_distance,
    real_moments,
)
from jacobiflow_lab.metrics.brisque import SMALLEST
from jacobiflow_lab.metrics.evaluation import choose
from jacobiflow_lab.metrics.fid import Collector
from jacobiflow_lab.paper.timing import EXACT
from jacobiflow_lab.paper.workshop import AT_ONCE, Context, Workshop

NO_CLIP = "no CLIP weights: give --clip"


@dataclass(frozen=True)
class Seen:
    """What is kept of the samples of one plan."""

    moments: Moments
    lost: int  # samples that are not finite: they are looked at as black
    scored: int  # samples, from the first on, that were asked to be scored
    brisque: Tensor | None
    clip: Tensor | None

    def first(self, n: int) -> Seen:
        """Features of the first n samples only; the scores are those that there are."""
        if n >= self.moments.count:
            return self
        return replace(self, moments=Moments.of(self.moments.features[:n]))


def look(shop: Workshop, model: str, plan: Plan, n: int, seed: int, *, scored: int = 0) -> Seen:
    """Features of n samples, and scores of the first `scored`; what was looked at before is not again."""
    known: dict[str, Seen] = shop.once(("seen", model, plan.methods, seed), dict)
    most = known.get("most")
    if most is None or most.moments.count < n or most.scored < scored:
        most = known["most"] = collect(shop, model, plan, n, seed, scored)
    return most.first(n)


def collect(shop: Workshop, model: str, plan: Plan, n: int, seed: int, scored: int) -> Seen:
    """Draw a few at a time, and look."""
    network, seen = load_inception(shop.device), Collector(n)
    scorer = shop.once("clip", lambda: ClipScorer(shop.clip, shop.device)) if shop.clip and scored else None
    brisque: list[Tensor] = []
    clip: list[Tensor] = []
    lost = 0
    for start in range(0, n, AT_ONCE):
        x = shop.pictures(model, plan, min(AT_ONCE, n - start), seed=seed, start=start)
        lost += int((~x.isfinite().flatten(1).all(1)).sum())
        pixels = shop.shown(x)
        seen.add(start, features(pixels.to(shop.device), network))
        some = pixels[: max(scored - start, 0)]
        if len(some) and min(some.shape[2:]) >= SMALLEST:
            brisque.append(brisque_scores(some))
        if len(some) and scorer is not None:
            clip.append(scorer(some))
        shop.note(f"{model}: {start + len(pixels):,} of {n:,} samples looked at")
    return Seen(seen.moments(World()), lost, scored, _all(brisque), _all(clip))


def _all(parts: list[Tensor]) -> Tensor | None:
    """Scores that are there, if they are enough for a mean."""
    found = torch.cat(parts) if parts else torch.empty(0)
    return found if int(found.isfinite().sum()) >= 2 else None


def real(shop: Workshop, model: str, n: int) -> Moments:
    """Features of n training images, the same ones every time."""

    def make() -> Moments:
        chosen = choose(shop.images(model)[0], n, labelled=False)
        return real_moments(chosen, network=load_inception(shop.device), device=shop.device)

    return shop.once(("real", model, n), make)


def judge(
    context: Context,
    plans: Mapping[str, Plan],
    counts: Mapping[str, int],
    *,
    runs: int,
    full: bool,
    scored: int,
) -> dict[str, dict[str, Any]]:
    """Quality of every plan on the same noise and labels; the plan "sequential" is the reference.

    counts: samples of each. full: FID too, of those with as many samples as "sequential" has. scored: samples
    that get BRISQUE and CLIP-IQA. Every figure is the mean over runs, its spread the largest deviation of a
    run from it.
    """
    shop, model, most = context.workshop, context.model, counts[EXACT]
    known = real(shop, model, most)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for run in range(runs):
        seed = context.seed + run
        exact = look(shop, model, plans[EXACT], most, seed, scored=scored)
        for name, plan in plans.items():
            n = counts[name]
            seen = look(shop, model, plan, n, seed, scored=min(scored, n))
            whole = full and n == most
            found[name].append(measure(seen, exact.first(n), known, full=whole, clip=shop.clip))
    return {name: summary(each) for name, each in found.items()}


def measure(seen: Seen, exact: Seen, known: Moments, *, full: bool, clip: str) -> dict[str, Any]:
    """One run of one plan."""
    paired = paired_distance(seen.moments.features, exact.moments.features)
    small = kid(known, seen.moments)
    return {
        "samples": seen.moments.count,
        "not_finite": seen.lost,
        "scored": 0 if seen.brisque is None else len(seen.brisque),
        "real": known.count,
        "fid": fid_of(known, seen.moments).value if full else None,
        "kid": small.value,
        "kid_std": small.std,
        "paired": paired.value,
        "paired_relative": paired.relative,
        "brisque": None if seen.brisque is None else mean_brisque(seen.brisque, 0).value,
        "clip_iqa": None if seen.clip is None else mean_clip_iqa(seen.clip, clip).value,
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over runs, and for each figure the largest deviation of a run."""
    means: dict[str, Any] = {}
    for key, first in runs[0].items():
        values = [run[key] for run in runs]
        means[key] = first if first is None or isinstance(first, int) else sum(values) / len(values)
    spread = {
        key: max(abs(run[key] - value) for run in runs)
        for key, value in means.items()
        if isinstance(value, float)
    }
    return means | {"runs": len(runs), "spread": spread}
