"""The ablation of first guesses (Figure 6)."""

from __future__ import annotations

from jacobiflow.core.method import Init, Plan
from jacobiflow_lab.paper import figures
from jacobiflow_lab.paper.sampling import TAU
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import Column, Table
from jacobiflow_lab.paper.timing import timed

PAPER_GUESSES: tuple[Init, ...] = ("zeros", "noise", "previous")  # the paper's


def run(task: Task) -> Result:
    """Selective decoding at tau 0.5 from each first guess: time, sweeps, distance from sequential."""
    scale, batch = task.scale, task.scale.batches[-1]
    plans: dict[str, Plan] = {i: task.flow.plan("selective", tol=TAU, init=i) for i in PAPER_GUESSES}
    rows = timed(task, plans, batch, runs=scale.runs, repeats=scale.repeats)
    path = task.picture("initialisation")
    blocks = [f"block {i + 1}" for i in range(1, len(rows[0]["sweeps"]))]
    figures.bars(
        path,
        [
            ("speed-up over sequential", ["decoding"], {row["method"]: [row["speedup"]] for row in rows}),
            ("sweeps (mean)", blocks, {row["method"]: row["sweeps"][1:] for row in rows}),
        ],
        title=f"{task.model}: first guesses, tau {TAU:g}",
    )
    return Result(
        data={"tau": TAU, "rows": rows},
        counts={"batch": batch, "samples": batch * scale.runs * scale.repeats, "runs": scale.runs},
        pictures=(
            Picture(path.name, f"{task.model}: speed-up, and sweeps of the swept blocks, by first guess."),
        ),
    )


FIRST_GUESSES = Table(
    rows="rows",
    columns=(
        Column("first guess", "{method}"),
        Column("seconds", "{seconds:.3f} ± {spread:.3f}"),
        Column("speed-up", "{speedup:.2f}x"),
        Column("sweeps, block *", "{sweeps/*:.1f}", over="sweeps", empty=""),
        Column("largest dev.", "{largest:.2g}"),
    ),
    note="Selective decoding. Noise: standard normal. Previous: the block's input. Block 1 is decoded "
    "sequentially. The largest deviation is from sequential decoding of the same noise.",
)

ITEM = Item(
    name="initialisation",
    run=run,
    tables=(FIRST_GUESSES,),
)
