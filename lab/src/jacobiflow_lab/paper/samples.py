"""Samples side by side (Figures 3, A7 and A8)."""

from __future__ import annotations

from jacobiflow_lab.paper import figures
from jacobiflow_lab.paper.sampling import METHODS, TAU, all_plans, draw
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import Column, Table
from jacobiflow_lab.paper.timing import timed

COLUMNS = 8
OTHER_SAMPLES = 24  # of each method that is not in the first picture


def run(task: Task) -> Result:
    """The same noise by every method, denoised as the paper's samples are, titled by the speed-up."""
    n, batch = task.scale.shown, task.scale.batches[-1]
    plans = all_plans(task, batch)
    loop, *rows = timed(task, plans, batch, runs=1, repeats=task.scale.repeats, plain=True)
    pixels = {method: draw(task, plan, n) for method, plan in plans.items()}
    titles = {row["method"]: f"{row['method']}, {row['against_plain']:.1f}x" for row in rows}
    pair, rest = task.picture("samples"), task.picture("samples-more")
    both = ("sequential", "selective")
    figures.grids(pair, {titles[m]: pixels[m] for m in both}, columns=COLUMNS, across=2, title=task.model)
    others = {titles[m]: pixels[m][:OTHER_SAMPLES] for m in METHODS if m not in both}
    figures.grids(rest, others, columns=COLUMNS, across=2)
    exact = pixels["sequential"].float()
    for row in rows:
        row["grey_levels"] = float((pixels[row["method"]].float() - exact).abs().mean())
    return Result(
        data={"tau": TAU, "batch": batch, "plain_loop_seconds": loop["seconds"], "rows": rows},
        counts={"samples": n, "timed_batch": batch},
        pictures=(
            Picture(
                pair.name,
                f"{task.model}: the same noise by both decoders; speed-ups are over the loop of public code.",
                task.restricted,
            ),
            Picture(rest.name, f"{task.model}: the same noise by the other methods.", task.restricted),
        ),
    )


SAMPLES = Table(
    rows="rows",
    columns=(
        Column("method", "{method}"),
        Column("over plain loop", "{against_plain:.2f}x"),
        Column("over sequential", "{speedup:.2f}x"),
        Column("mean difference, grey levels of 255", "{grey_levels:.3f}", better="lower"),
    ),
    note="Speed-ups of decoding alone: over the loop of public code, as the paper's are, and over our "
    "compiled sequential decoding.",
)

ITEM = Item(
    name="samples",
    run=run,
    tables=(SAMPLES,),
    settings=lambda task: {"others": OTHER_SAMPLES},
)
