"""The ablation of the stopping threshold (Figure 5)."""

from __future__ import annotations

from collections.abc import Sequence

from jacobiflow.paper import drawing
from jacobiflow.paper.item import Cell, Docs, Figure, Item, Picture, Result, Table, missing_rows, present
from jacobiflow.paper.quality import BIASED, judge
from jacobiflow.paper.timing import timed
from jacobiflow.paper.workshop import TAU, Context

ENOUGH = 1000  # samples for FID to say something


def run(context: Context) -> Result:
    """Selective decoding at every tau: time, deviation and quality."""
    shop, scale, batch = context.workshop, context.scale, context.scale.batches[-1]
    plans = {"sequential": context.flow.plan("sequential")}
    plans |= {f"{tau:g}": shop.plan(context.model, "selective", batch, tau=tau) for tau in scale.taus}
    speed = timed(context, plans, batch, runs=1, repeats=scale.repeats)
    n = shop.few()
    full = context.model in scale.judged and n >= ENOUGH
    quality = judge(context, plans, dict.fromkeys(plans, n), runs=1, full=full, scored=0)
    rows = [row | {"quality": quality[row["method"]]} for row in speed]
    path = context.picture("tolerance")
    key, label = ("fid", f"FID ({n:,} samples)") if full else ("paired_relative", "paired distance")
    drawing.trade(
        path,
        scale.taus,
        (label, [row["quality"][key] for row in rows[1:]]),
        [row["seconds"] for row in rows[1:]],
        exact=(rows[0]["quality"][key], rows[0]["seconds"]),
        title=f"{context.model}: quality and time against tau",
        mark=TAU,
    )
    return Result(
        data={"taus": list(scale.taus), "rows": rows},
        counts={"batch": batch, "timed_batches": scale.repeats, "quality_samples": n},
        seeds={"noise": context.seed},
        pictures=(Picture(path.name, f"{context.model}: selective decoding. Dotted: sequential decoding."),),
    )


def tables(docs: Docs) -> list[Table]:
    """A row for each model and tau."""
    head = ("model", "tau", "seconds", "speed-up", "FID ↓", "KID ↓", "paired ↓", "largest dev.", "samples")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, row in enumerate(docs[model]["data"]["rows"]):
            at = f"rows/{i}"
            rows.append(
                (
                    model if i == 0 else "",
                    row["method"],
                    Figure(model, f"{at}/seconds", "{:.3f}"),
                    (Figure(model, f"{at}/speedup"), "x"),
                    Figure(model, f"{at}/quality/fid"),
                    Figure(model, f"{at}/quality/kid", "{:.4f}"),
                    Figure(model, f"{at}/quality/paired_relative", "{:.4f}"),
                    Figure(model, f"{at}/largest", "{:.2g}"),
                    Figure(model, f"{at}/quality/samples", "{:,}"),
                )
            )
    note = f"All rows decode the same noise, so that small differences mean something. {BIASED}"
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


ITEM = Item(
    name="tolerance",
    title="The stopping threshold",
    shows="Figure 5",
    models=lambda scale: scale.images,
    run=run,
    tables=tables,
    words=(
        "FID and time against tau for CIFAR-10, CIFAR-100 and AFHQ: time falls as tau grows, FID rises "
        "slowly "
        "below 1 and faster above; 0.5 is the paper's choice. The plots have no numbers."
    ),
    minutes=lambda scale, model: 2.0,
)
