"""Beyond the paper: does the redundancy exist before training ends?"""

from __future__ import annotations

import torch
from torch import Tensor

from jacobiflow_lab.analysis.plots import save_progress
from jacobiflow_lab.analysis.sweeps import progress
from jacobiflow_lab.paper.assets import training_run
from jacobiflow_lab.paper.sampling import TAU
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import Column, Table


def run(task: Task) -> Result:
    """Sweeps of every block, all swept, of each checkpoint that training kept."""
    n = task.scale.analysed

    def labels(classes: int) -> Tensor | None:
        return torch.arange(n, device=task.device) % classes if classes else None

    run_folder = training_run(task.session, task.model)
    found = progress(
        run_folder, n=n, seed=task.seed, labels=labels, device=task.device, tol=TAU, init="zeros"
    )
    path = task.picture("undertrained")
    save_progress(found, path, title=f"{task.model}: sweeps while training, tau {TAU:g}")
    return Result(
        data={"tau": TAU} | found.to_dict(),
        counts={"samples": n, "checkpoints": len(found.moments)},
        pictures=(Picture(path.name, f"{task.model}: every block swept, from zeros."),),
    )


CHECKPOINTS = Table(
    rows="moments",
    columns=(
        Column("training step", "{step:,}"),
        Column("block *", "{sweeps/layers/*/mean:.1f}", over="sweeps/layers", empty=""),
    ),
    note="Sweeps at tau 0.5, mean over samples; block 1 is next to the noise.",
)

ITEM = Item(
    name="undertrained",
    run=run,
    tables=(CHECKPOINTS,),
    minutes=lambda scale, model: 0.3,
    of_run=True,
    needs=lambda task: training_run(task.session, task.model),
)
