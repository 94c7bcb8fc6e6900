"""Past the paper: is the redundancy there in models that are not trained to the end?"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jacobiflow_lab.analysis.plots import save_progress
from jacobiflow_lab.analysis.progress import progress
from jacobiflow_lab.paper.item import Cell, Docs, Figure, Item, Picture, Result, Table, missing_rows, present
from jacobiflow_lab.paper.workshop import TAU, Context


def run(context: Context) -> Result:
    """Sweeps of every block, all swept, of each checkpoint that training kept."""
    n = context.scale.analysed

    def labels(classes: int) -> Tensor | None:
        return torch.arange(n, device=context.workshop.device) % classes if classes else None

    found = progress(
        context.workshop.run_of(context.model),
        n=n,
        seed=context.seed,
        labels=labels,
        device=context.workshop.device,
        tol=TAU,
        init="zeros",
    )
    path = context.picture("undertrained")
    save_progress(found, path, title=f"{context.model}: sweeps while training, tau {TAU:g}")
    return Result(
        data={"tau": TAU} | found.to_dict(),
        counts={"samples": n, "checkpoints": len(found.moments)},
        seeds={"noise": context.seed},
        pictures=(Picture(path.name, f"{context.model}: every layer swept, from zeros."),),
    )


def tables(docs: Docs) -> list[Table]:
    """A row for each kept checkpoint, a column for each layer."""
    there = present(docs)
    most = max((len(docs[m]["data"]["moments"][0]["sweeps"]["layers"]) for m in there), default=1)
    head = ("model", "training step", *(f"layer {k + 1}" for k in range(most)))
    rows: list[Sequence[Cell]] = []
    for model in there:
        for i, moment in enumerate(docs[model]["data"]["moments"]):
            layers = len(moment["sweeps"]["layers"])
            cells = [
                Figure(model, f"moments/{i}/sweeps/layers/{k}/mean", "{:.1f}") if k < layers else ""
                for k in range(most)
            ]
            rows.append((model if i == 0 else "", Figure(model, f"moments/{i}/step", "{:,}"), *cells))
    note = "Sweeps at tau 0.5, mean over samples; layer 1 is next to the noise."
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


ITEM = Item(
    name="undertrained",
    title="Redundancy while training",
    shows="not in the paper: its first open question",
    models=lambda scale: scale.images,
    run=run,
    tables=tables,
    words="The paper leaves open whether the redundancy is there in models that are not trained to the end.",
    minutes=lambda scale, model: 0.3,
    of_run=True,
    needs=lambda context: context.workshop.run_of(context.model),
)
