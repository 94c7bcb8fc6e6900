"""The ablation of the stopping threshold (Figure 5)."""

from __future__ import annotations

from jacobiflow_lab.analysis.plots import save_against_tau
from jacobiflow_lab.paper.quality import EXACT, judge
from jacobiflow_lab.paper.sampling import TAU, all_plans
from jacobiflow_lab.paper.schema import Doc, Item, Picture, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import FID_BIAS

LOOSE = 2.0  # the tau at which the paper's quality is clearly worse
SHOWN = {"fid": "FID", "kid": "KID", "paired_relative": "paired distance"}


def run(task: Task) -> Result:
    """Selective decoding at every tau: quality, drawn with the times of the item `timing`."""
    scale, n = task.scale, task.few_samples()
    names = [f"tau {tau:g}" for tau in scale.taus]
    plans = all_plans(task, scale.batches[-1], (EXACT, *names))
    claimed = [(f"tau {TAU:g}", f"tau {LOOSE:g}")] if {TAU, LOOSE} <= set(scale.taus) else []
    quality = judge(task, plans, dict.fromkeys(plans, n), full=task.judged, changes=claimed)
    rows: list[Doc] = [{"method": name.removeprefix("tau "), "quality": quality[name]} for name in plans]
    path = task.picture("tolerance")
    save_against_tau(
        path,
        scale.taus,
        {
            label: [row["quality"][key] for row in rows]
            for key, label in SHOWN.items()
            if quality[EXACT][key] is not None
        },
        seconds(task),
        title=f"{task.model}: quality and time against tau",
        mark=TAU,
    )
    caption = f"{task.model}: selective decoding from zeros. {FID_BIAS} The paired distance says how much changes."
    return Result(
        data={"taus": list(scale.taus), "rows": rows},
        counts={"quality_samples": n, "resamples": scale.resamples},
        pictures=(Picture(path.name, caption),),
    )


def seconds(task: Task) -> list[float]:
    """Of sequential decoding and of every tau, in torch; empty if they were not timed."""
    timed = task.session.rows.get("timing", {}).get(task.model, {}).get("data")
    if timed is None:
        return []
    largest = max(row["batch"] for row in timed["compare"])
    exact = next(r for r in timed["compare"] if r["plan"] == EXACT and r["batch"] == largest)
    return [exact["seconds"], *(row["seconds"] for row in timed["taus"])]


ITEM = Item(
    name="tolerance",
    run=run,
    uses=("timing",),
    minutes=lambda scale, model: scale.scoring_minutes(model, 0, len(scale.taus) + 1),
)
