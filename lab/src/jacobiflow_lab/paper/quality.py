"""The quality of samples by plan, by the metrics of `jacobiflow evaluate`: Table 1 and Figure 5, beside `timing`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.method import Plan
from jacobiflow.flows.guidance import Guidance
from jacobiflow_lab.analysis.plots import save_against_tau
from jacobiflow_lab.metrics import METRICS, Moments, fid_of, load_inception, paired_changes, real_moments
from jacobiflow_lab.metrics.brisque import MIN_SIDE
from jacobiflow_lab.metrics.distributed_map import DistributedMap
from jacobiflow_lab.metrics.evaluation import choose
from jacobiflow_lab.metrics.metric import Evidence
from jacobiflow_lab.metrics.samples import SampleFeatures, Sampling, Scorers, collect, results
from jacobiflow_lab.paper.sampling import METHODS, PAPER_METHODS, SAMPLES_AT_ONCE, TAU, all_plans
from jacobiflow_lab.paper.schema import Doc, Item, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import FID_BIAS

EXACT = "sequential"
THIRDS = 3  # disjoint parts of the samples that stand for the paper's three runs
LOOSE = 2.0  # the tau at which the paper's quality is clearly worse
SHOWN = {"fid": "FID", "kid": "KID", "paired_relative": "paired distance"}


def look(task: Task, plan: Plan, n: int, *, scored: int = 0, guidance: float = 0.0) -> SampleFeatures:
    """Features of n samples, and scores of the first `scored`; nothing is drawn twice."""
    key = ("features", task.model, plan.methods, task.seed, guidance)
    known: dict[str, SampleFeatures] = task.session.once(key, dict)
    most = known.get("most")
    if most is None or most.count < n or most.scored < scored:

        def note(what: str, done: int, total: int) -> None:
            if done % (8 * SAMPLES_AT_ONCE) == 0 or done == total:
                task.session.note(f"{task.model}: {done:,} of {total:,} samples measured")

        guide = Guidance(weight=guidance, annealed=True) if guidance else task.session.annealed_guidance
        most = known["most"] = collect(
            Sampling(flow=task.flow, plan=plan, guidance=guide, seed=task.seed),
            n,
            scorers(task) if scored else Scorers(load_inception(task.device)),
            DistributedMap(batch=SAMPLES_AT_ONCE, progress=note),
            scored=scored,
            stored=True,
        )
    return most.first(n)


def scorers(task: Task) -> Scorers:
    """The feature network, BRISQUE where images are large enough, and CLIP-IQA where there is a CLIP."""
    clip, shape = task.session.clip, task.flow.image_shape
    names = ["brisque"] if shape is not None and min(shape[1:]) >= MIN_SIDE else []
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
    full: bool,
    scored: int = 0,
    changes: Sequence[tuple[str, str]] = (),
) -> dict[str, Doc]:
    """Quality of every plan on the same noise and labels; the plan "sequential" is the reference.

    counts: samples per plan. full: with FID, for plans with as many samples as "sequential". scored: samples
    that get BRISQUE and CLIP-IQA. changes: pairs of plans whose scores are compared, with paired intervals;
    the row of the second plan has them as `change`.
    """
    most = counts[EXACT]
    known = real(task, most)
    seen = {name: look(task, plan, counts[name], scored=min(scored, counts[name])) for name, plan in plans.items()}
    found = {
        name: measure(task, samples, seen[EXACT].first(counts[name]), known, full=full and counts[name] == most)
        for name, samples in seen.items()
    }
    for first, second in changes:
        task.session.note(f"{task.model}: intervals of the change from {first} to {second}")
        found[second]["change"] = change(task, seen[first], seen[second], known, fid=full) | {"from": first}
    return found


def measure(task: Task, samples: SampleFeatures, exact: SampleFeatures, known: Moments, *, full: bool) -> Doc:
    """One plan. A score is None if there is none, or if there are too few for a mean."""
    names = ["kid", "paired", *(["fid"] if full else [])]
    names += [name for name, values in samples.scores.items() if int(values.isfinite().sum()) >= 2]
    evidence = Evidence(
        samples=samples,
        reference=exact,
        real=known,
        network=load_inception(task.device).version,
        clip=task.session.clip,
        reference_plan=EXACT,
    )
    found = results([METRICS[name] for name in names], evidence)
    values: dict[str, Any] = {name: found[name].value if name in found else None for name in METRICS}
    thirds, spread = fid_thirds(known, samples.moments) if full else ([], None)
    return {
        "samples": samples.count,
        "not_finite": samples.not_finite,
        "scored": len(samples.scores["brisque"]) if "brisque" in names else 0,
        "real": known.count,
        "fid": values["fid"],
        "fid_thirds": thirds,
        "fid_spread": spread,
        "kid": values["kid"],
        "kid_std": found["kid"].std,
        "paired": values["paired"],
        "paired_relative": found["paired"].relative,
        "brisque": values["brisque"],
        "brisque_error": found["brisque"].error if "brisque" in found else None,
        "clip_iqa": values["clip-iqa"],
    }


def fid_thirds(known: Moments, seen: Moments) -> tuple[list[float], float]:
    """FID of three disjoint thirds of the samples, and the largest deviation of one from their mean."""
    thirds = [fid_of(known, part).value for part in seen.features.chunk(THIRDS)]
    return thirds, max(abs(third - sum(thirds) / len(thirds)) for third in thirds)


def change(task: Task, before: SampleFeatures, after: SampleFeatures, known: Moments, *, fid: bool) -> Doc:
    """Relative changes of FID and KID, and the change of BRISQUE in its own unit, each with its interval."""
    both = before.paired_features(after)
    found = paired_changes(known, *both, fid=fid, resamples=task.scale.resamples, seed=task.seed)
    doc: Doc = {name: None if one is None else asdict(one) | {"half": one.half} for name, one in found.items()}
    scores = [x.scores.get("brisque", torch.empty(0)) for x in (before, after)]
    return doc | {"brisque": mean_change(*scores)}


def mean_change(before: Tensor, after: Tensor) -> Doc | None:
    """The mean of after - before over samples that have both, with an interval of two standard errors.

    None: there are too few, or samples were left out, so that rows are not pairs.
    """
    if len(before) != len(after):
        return None
    apart = (after - before)[(after - before).isfinite()].double()
    if len(apart) < 2:
        return None
    value, error = float(apart.mean()), float(apart.std() / len(apart) ** 0.5)
    return {"value": value, "low": value - 2 * error, "high": value + 2 * error, "half": 2 * error}


def run_comparison(task: Task) -> Result:
    """Quality of as many samples as the scale says, and one row with annealed guidance."""
    scale, n, few = task.scale, task.samples(), task.few_samples()
    scored = min(n, task.session.samples or scale.scored or n)
    plans = all_plans(task, scale.batches[-1], METHODS)
    counts = {method: n if method in PAPER_METHODS else few for method in plans}
    changes = [(EXACT, method) for method in PAPER_METHODS[1:]]
    quality = judge(task, plans, counts, full=task.judged, scored=scored, changes=changes)
    if task.flow.num_classes and scale.guided:
        quality[f"selective, annealed guidance {scale.guided:g}"] = guided(task, n)
    counted = {"quality_samples": n, "quality_samples_beyond_the_paper": few, "scored_samples": scored}
    return Result(
        data={
            "tau": scale.tau,
            "quality": quality,
            "plans": {name: [vars(method) for method in plan] for name, plan in plans.items()},
        },
        counts=counted | {"real_images": quality[EXACT]["real"], "resamples": scale.resamples},
    )


def guided(task: Task, n: int) -> Doc:
    """Selective decoding with annealed guidance, beside the unguided samples of the same noise."""
    plan = task.plan("selective")
    samples = look(task, plan, n, guidance=task.scale.guided)
    return measure(task, samples, look(task, plan, n), real(task, n), full=task.judged)


def run_tolerance(task: Task) -> Result:
    """Selective decoding at every tau: quality, drawn with the times of the item `timing`."""
    scale, n = task.scale, task.few_samples()
    names = [f"tau {tau:g}" for tau in scale.taus]
    plans = all_plans(task, scale.batches[-1], (EXACT, *names))
    claimed = [(f"tau {TAU:g}", f"tau {LOOSE:g}")] if {TAU, LOOSE} <= set(scale.taus) else []
    quality = judge(task, plans, dict.fromkeys(plans, n), full=task.judged, changes=claimed)
    rows: list[Doc] = [{"method": name.removeprefix("tau "), "quality": quality[name]} for name in plans]
    shown = {
        label: [row["quality"][key] for row in rows] for key, label in SHOWN.items() if quality[EXACT][key] is not None
    }
    title = f"{task.model}: quality and time against tau"
    draw = partial(save_against_tau, taus=scale.taus, panels=shown, seconds=seconds(task), title=title, mark=TAU)
    caption = f"{task.model}: selective decoding from zeros. {FID_BIAS} The paired distance says how much changes."
    return Result(
        data={"taus": list(scale.taus), "rows": rows},
        counts={"quality_samples": n, "resamples": scale.resamples},
        pictures=(task.picture("tolerance", caption, draw),),
    )


def seconds(task: Task) -> list[float]:
    """Of sequential decoding and of every tau, in torch; empty if they were not timed."""
    timed = task.session.rows.get("timing", {}).get(task.model, {}).get("data")
    if timed is None:
        return []
    largest = max(row["batch"] for row in timed["compare"])
    exact = next(r for r in timed["compare"] if r["plan"] == EXACT and r["batch"] == largest)
    return [exact["seconds"], *(row["seconds"] for row in timed["taus"])]


COMPARISON = Item(
    name="comparison",
    run=run_comparison,
    minutes=lambda scale, model: scale.scoring_minutes(model, 5, 4) + 0.2 * scale.resamples * (model in scale.judged),
)
TOLERANCE = Item(
    name="tolerance",
    run=run_tolerance,
    uses=("timing",),
    minutes=lambda scale, model: scale.scoring_minutes(model, 0, len(scale.taus) + 1),
)
