"""The quality of the main comparison (Table 1), with more methods; its times are in `timing`."""

from __future__ import annotations

from jacobiflow_lab.paper.quality import EXACT, judge, look, measure, real
from jacobiflow_lab.paper.sampling import METHODS, PAPER_METHODS, all_plans
from jacobiflow_lab.paper.schema import Doc, Item, Result
from jacobiflow_lab.paper.session import Task


def run(task: Task) -> Result:
    """Quality of as many samples as the scale says, and one row with annealed guidance."""
    scale, n, few = task.scale, task.samples(), task.few_samples()
    scored = min(n, task.session.samples or scale.scored or n)
    plans = all_plans(task, scale.batches[-1], METHODS)
    counts = {method: n if method in PAPER_METHODS else few for method in plans}
    changes = [(EXACT, method) for method in PAPER_METHODS[1:]]
    quality = judge(task, plans, counts, full=task.judged, scored=scored, changes=changes)
    if task.flow.num_classes and scale.guided:
        quality[f"selective, annealed guidance {scale.guided:g}"] = guided(task, n)
    return Result(
        data={
            "tau": scale.tau,
            "quality": quality,
            "plans": {name: [vars(method) for method in plan] for name, plan in plans.items()},
        },
        counts={
            "quality_samples": n,
            "quality_samples_beyond_the_paper": few,
            "scored_samples": scored,
            "real_images": quality[EXACT]["real"],
            "resamples": scale.resamples,
        },
    )


def guided(task: Task, n: int) -> Doc:
    """Selective decoding with annealed guidance, beside the unguided samples of the same noise."""
    plan = task.plan("selective")
    samples = look(task, plan, n, guidance=task.scale.guided)
    return measure(task, samples, look(task, plan, n), real(task, n), full=task.judged)


ITEM = Item(
    name="comparison",
    run=run,
    minutes=lambda scale, model: scale.scoring_minutes(model, 5, 4) + 0.2 * scale.resamples * (model in scale.judged),
)
