"""The ablation of first guesses (Figure 6)."""

from __future__ import annotations

from collections.abc import Sequence

from jacobiflow.core.plan import Plan
from jacobiflow.core.types import INITS
from jacobiflow_lab.paper import drawing
from jacobiflow_lab.paper.item import Cell, Docs, Figure, Item, Picture, Result, Table, missing_rows, present
from jacobiflow_lab.paper.timing import timed
from jacobiflow_lab.paper.workshop import TAU, Context

NAMES = {"zeros": "zeros", "noise": "standard normal", "previous": "the layer's input"}


def run(context: Context) -> Result:
    """Selective decoding at tau 0.5 from each first guess: time, sweeps, distance from sequential."""
    scale, batch = context.scale, context.scale.batches[-1]
    plans: dict[str, Plan] = {init: context.flow.plan("selective", tol=TAU, init=init) for init in INITS}
    rows = timed(context, plans, batch, runs=scale.runs, repeats=scale.repeats)
    path = context.picture("initialisation")
    layers = [f"layer {i + 1}" for i in range(1, len(rows[0]["sweeps"]))]
    drawing.bars(
        path,
        [
            ("speed-up over sequential", ["decoding"], {NAMES[r["method"]]: [r["speedup"]] for r in rows}),
            ("sweeps (mean)", layers, {NAMES[row["method"]]: row["sweeps"][1:] for row in rows}),
        ],
        title=f"{context.model}: first guesses, tau {TAU:g}",
    )
    total = batch * scale.runs * scale.repeats
    return Result(
        data={"tau": TAU, "rows": rows},
        counts={"batch": batch, "samples": total, "runs": scale.runs},
        seeds={"noise": context.seed},
        pictures=(
            Picture(path.name, f"{context.model}: speed-up, and sweeps of the swept layers, by first guess."),
        ),
    )


def tables(docs: Docs) -> list[Table]:
    """A row for each model and first guess."""
    head = ("model", "first guess", "seconds", "speed-up", "sweeps of layers 2, 3, ...", "largest dev.")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, row in enumerate(docs[model]["data"]["rows"]):
            at = f"rows/{i}"
            sweeps: list[str | Figure] = []
            for k in range(1, len(row["sweeps"])):
                sweeps += [Figure(model, f"{at}/sweeps/{k}", "{:.1f}"), "  "]
            rows.append(
                (
                    model if i == 0 else "",
                    NAMES[row["method"]],
                    (
                        Figure(model, f"{at}/seconds", "{:.3f}"),
                        " ± ",
                        Figure(model, f"{at}/spread", "{:.3f}"),
                    ),
                    (Figure(model, f"{at}/speedup"), "x"),
                    tuple(sweeps),
                    Figure(model, f"{at}/largest", "{:.2g}"),
                )
            )
    note = "Selective decoding; the largest deviation is from sequential decoding of the same noise."
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


ITEM = Item(
    name="initialisation",
    title="First guesses",
    shows="Figure 6",
    models=lambda scale: scale.images,
    run=run,
    tables=tables,
    words=(
        "A plot of the acceleration from zeros, from standard normal noise and from the previous layer's "
        "output: about the same for all three. The picture has no numbers."
    ),
    minutes=lambda scale, model: 0.2,
)
