"""Beyond the paper: does the redundancy exist before training ends?"""

from __future__ import annotations

from jacobiflow_lab.analysis.plots import save_progress
from jacobiflow_lab.analysis.sweeps import progress
from jacobiflow_lab.paper.costs import extremes
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task


def run(task: Task) -> Result:
    """Sweeps of every block, all swept, of each checkpoint that training kept."""
    scale, n = task.scale, task.scale.analysed
    found = progress(
        task.training_run,
        n=n,
        seed=task.seed,
        labels=lambda classes: task.labels_for(classes, n),
        device=task.device,
        say=task.session.note,
        tol=scale.tau,
        init=scale.inits[0],
        batch=min(scale.batches[-1], n),
    )
    path = task.picture("progress")
    save_progress(found, path, title=f"{task.model}: sweeps while training")
    doc = found.to_dict()
    for moment, counted in zip(doc["moments"], found.moments, strict=True):
        moment["sweeps"] |= extremes(counted.sweeps)
    return Result(
        data={"tau": scale.tau} | doc,
        counts={"samples": n, "checkpoints": len(found.moments)},
        pictures=(Picture(path.name, f"{task.model}: every block swept, from zeros. Fewer is better."),),
    )


ITEM = Item(
    name="undertrained",
    models=lambda scale: tuple(dict.fromkeys((*scale.images, *scale.generators))),
    run=run,
    minutes=lambda scale, model: 0.3,
    of_run=True,
    needs=lambda task: task.training_run,
)
