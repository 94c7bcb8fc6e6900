"""Beyond the paper: does the redundancy exist before training ends?"""

from __future__ import annotations

from functools import partial

from jacobiflow_lab.analysis.plots import save_progress
from jacobiflow_lab.analysis.sweeps import progress
from jacobiflow_lab.paper.costs import extremes
from jacobiflow_lab.paper.schema import Item, Result
from jacobiflow_lab.paper.session import Task


def run(task: Task) -> Result:
    """Sweeps of every block, all swept, of each checkpoint that training kept."""
    scale, n = task.scale, task.scale.analysed
    found = progress(
        task.training_run,
        n=n,
        seed=task.seed,
        labels=partial(task.labels, n),
        device=task.device,
        say=task.session.note,
        tol=scale.tau,
        init=scale.inits[0],
        batch=min(scale.batches[-1], n),
    )
    doc = found.to_dict()
    for moment, counted in zip(doc["moments"], found.moments, strict=True):
        moment["sweeps"] |= extremes(counted.sweeps)
    draw = partial(save_progress, found, title=f"{task.model}: sweeps while training")
    caption = f"{task.model}: every block swept, from zeros. Fewer is better."
    return Result(
        data={"tau": scale.tau} | doc,
        counts={"samples": n, "checkpoints": len(found.moments)},
        pictures=(task.picture("progress", caption, draw),),
    )


ITEM = Item(
    name="undertrained",
    models=lambda scale: tuple(dict.fromkeys((*scale.images, *scale.generators))),
    run=run,
    minutes=lambda scale, model: 0.3,
    of_run=True,
    needs=lambda task: task.training_run,
)
