"""The quality of samples by plan, by the same metrics as `jacobiflow evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jacobiflow.core.method import Plan
from jacobiflow_lab.metrics import METRICS, Moments, load_inception, real_moments
from jacobiflow_lab.metrics.brisque import MIN_SIDE
from jacobiflow_lab.metrics.distributed_map import DistributedMap
from jacobiflow_lab.metrics.evaluation import choose
from jacobiflow_lab.metrics.metric import Evidence
from jacobiflow_lab.metrics.samples import SampleFeatures, Sampling, Scorers, collect, results
from jacobiflow_lab.paper.assets import data_shape
from jacobiflow_lab.paper.sampling import SAMPLES_AT_ONCE
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.timing import EXACT

NO_CLIP = "no CLIP weights: give --clip"


def look(task: Task, plan: Plan, n: int, seed: int, *, scored: int = 0) -> SampleFeatures:
    """Features of n samples, and scores of the first `scored`; nothing is drawn twice."""
    known: dict[str, SampleFeatures] = task.session.once(("features", task.model, plan.methods, seed), dict)
    most = known.get("most")
    if most is None or most.count < n or most.scored < scored:

        def note(what: str, done: int, total: int) -> None:
            task.session.note(f"{task.model}: {done:,} of {total:,} samples measured")

        most = known["most"] = collect(
            Sampling(flow=task.flow, plan=plan, guidance=task.session.annealed_guidance, seed=seed),
            n,
            scorers(task) if scored else Scorers(load_inception(task.device)),
            DistributedMap(batch=SAMPLES_AT_ONCE, progress=note),
            scored=scored,
        )
    return most.first(n)


def scorers(task: Task) -> Scorers:
    """The feature network, BRISQUE where images are large enough, and CLIP-IQA where there is a CLIP."""
    clip = task.session.clip
    names = ["brisque"] if min(data_shape(task.flow)[1:]) >= MIN_SIDE else []
    chosen = [METRICS[name] for name in (*names, *(["clip-iqa"] if clip else []))]
    key = ("scores", len(names))
    scores = task.session.once(key, lambda: Scorers.load(chosen, None, clip, task.device).scores)
    return Scorers(load_inception(task.device), scores, task.device)


def real(task: Task, n: int) -> Moments:
    """Features of n training images, the same ones every time."""

    def make() -> Moments:
        chosen = choose(task.images[0], n, labelled=False)
        return real_moments(chosen, network=load_inception(task.device), device=task.device)

    return task.session.once(("real", task.model, n), make)


def judge(
    task: Task,
    plans: Mapping[str, Plan],
    counts: Mapping[str, int],
    *,
    runs: int,
    full: bool,
    scored: int,
) -> dict[str, dict[str, Any]]:
    """Quality of every plan on the same noise and labels; the plan "sequential" is the reference.

    counts: samples per plan. full: with FID, for plans with as many samples as "sequential". scored: samples
    that get BRISQUE and CLIP-IQA. Every figure is the mean over runs, its spread the largest deviation of a
    run from it.
    """
    most = counts[EXACT]
    known = real(task, most)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in plans}
    for run in range(runs):
        seed = task.seed + run
        exact = look(task, plans[EXACT], most, seed, scored=scored)
        for name, plan in plans.items():
            n = counts[name]
            samples = look(task, plan, n, seed, scored=min(scored, n))
            evidence = Evidence(
                samples=samples,
                reference=exact.first(n),
                real=known,
                network=load_inception(task.device).version,
                clip=task.session.clip,
                reference_plan=EXACT,
            )
            found[name].append(measure(evidence, full=full and n == most))
    return {name: summary(each) for name, each in found.items()}


def measure(evidence: Evidence, *, full: bool) -> dict[str, Any]:
    """One run of one plan. A score is None if there is none, or if there are too few for a mean."""
    samples = evidence["samples"]
    names = ["kid", "paired", *(["fid"] if full else [])]
    names += [name for name, values in samples.scores.items() if int(values.isfinite().sum()) >= 2]
    found = results([METRICS[name] for name in names], evidence)
    return {
        "samples": samples.count,
        "not_finite": samples.not_finite,
        "scored": len(samples.scores["brisque"]) if "brisque" in names else 0,
        "real": evidence["real"].count,
        "fid": found["fid"].value if full else None,
        "kid": found["kid"].value,
        "kid_std": found["kid"].std,
        "paired": found["paired"].value,
        "paired_relative": found["paired"].relative,
        "brisque": found["brisque"].value if "brisque" in found else None,
        "clip_iqa": found["clip-iqa"].value if "clip-iqa" in found else None,
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
