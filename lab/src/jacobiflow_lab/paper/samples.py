"""Samples side by side (Figures 3, A7 and A8)."""

from __future__ import annotations

from collections.abc import Sequence

from jacobiflow_lab.paper import drawing, paper_figures
from jacobiflow_lab.paper.item import Cell, Docs, Figure, Item, Picture, Result, Table, missing_rows, present
from jacobiflow_lab.paper.models import MODELS
from jacobiflow_lab.paper.timing import timed
from jacobiflow_lab.paper.workshop import METHODS, TAU, Context

COLUMNS = 8
OTHERS = 24  # samples of each of the other methods


def run(context: Context) -> Result:
    """The same noise by every method, denoised as the paper's samples are, with the speed-up above."""
    shop, n, batch = context.workshop, context.scale.shown, context.scale.batches[-1]
    plans = {method: shop.plan(context.model, method, batch, tau=TAU) for method in METHODS}
    rows = timed(context, plans, batch, runs=1, repeats=context.scale.repeats, plain=True)
    pictures = {method: shop.draw(context.model, plan, n) for method, plan in plans.items()}
    loop, *rows = rows
    titles = {row["method"]: f"{row['method']}, {row['against_plain']:.1f}x" for row in rows}
    pair, rest = context.picture("samples"), context.picture("samples-more")
    drawing.grids(
        pair,
        {titles[m]: pictures[m] for m in ("sequential", "selective")},
        columns=COLUMNS,
        across=2,
        title=context.model,
    )
    others = [m for m in METHODS if m not in ("sequential", "selective")]
    drawing.grids(rest, {titles[m]: pictures[m][:OTHERS] for m in others}, columns=COLUMNS, across=2)
    same = {m: float((pictures[m].float() - pictures["sequential"].float()).abs().mean()) for m in METHODS}
    return Result(
        data={
            "tau": TAU,
            "batch": batch,
            "plain_loop_seconds": loop["seconds"],
            "rows": [row | {"grey_levels": same[row["method"]]} for row in rows],
        },
        counts={"samples": n, "timed_batch": batch},
        seeds={"noise": context.seed},
        pictures=(
            Picture(
                pair.name,
                f"{context.model}: the same noise, decoded by both; speed-ups are over public code's loop.",
                context.restricted,
            ),
            Picture(rest.name, f"{context.model}: and by the other methods.", context.restricted),
        ),
    )


def tables(docs: Docs) -> list[Table]:
    """How far apart the pictures are."""
    head = (
        "model",
        "method",
        "over plain loop",
        "over sequential",
        "mean difference, grey levels of 255",
        "paper's speed-up",
    )
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, row in enumerate(docs[model]["data"]["rows"]):
            known = paper_figures.SHOWN_SPEEDUP.get(MODELS[model].beside)
            theirs = f"{known}x" if known and row["method"] == "selective" else ""
            rows.append(
                (
                    model if i == 0 else "",
                    row["method"],
                    (Figure(model, f"rows/{i}/against_plain"), "x"),
                    (Figure(model, f"rows/{i}/speedup"), "x"),
                    Figure(model, f"rows/{i}/grey_levels", "{:.3f}"),
                    theirs,
                )
            )
    note = (
        "Speed-ups of decoding alone: over the loop of public code, as the paper's are, and over our "
        "compiled sequential decoding."
    )
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


ITEM = Item(
    name="samples",
    title="Samples side by side",
    shows="Figures 3, A7 and A8",
    models=lambda scale: scale.images,
    run=run,
    tables=tables,
    words=(
        "Grids by sequential decoding and by selective decoding at tau 0.5, which look alike: AFHQ at 4.5 "
        "times the speed, CIFAR-10 at 3.6 times, CIFAR-100 at 4.7 times."
    ),
    settings=lambda context: {"others": OTHERS},
    minutes=lambda scale, model: 0.2,
)
