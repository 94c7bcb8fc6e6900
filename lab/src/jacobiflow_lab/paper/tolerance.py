"""The ablation of the stopping threshold (Figure 5)."""

from __future__ import annotations

from collections.abc import Sequence

from jacobiflow_lab.paper import drawing
from jacobiflow_lab.paper.item import (
    BIASED,
    UNEQUAL,
    Cell,
    Docs,
    Figure,
    Item,
    Picture,
    Result,
    Table,
    missing_rows,
    present,
)
from jacobiflow_lab.paper.quality import judge
from jacobiflow_lab.paper.timing import timed
from jacobiflow_lab.paper.workshop import TAU, Context

ENOUGH = 1000  # samples for FID to say something
JUDGED = (TAU, 2.0)  # what the paper says of quality is about these; they get as many samples as Table 1

WORDS = {
    "fid": f"{BIASED} KID is in the table.",
    "paired_relative": "Paired distance: of Inception features to sequential decoding of the same noise, "
    "in units of the distance between different samples; how much changes, not whether it is worse.",
}


def run(context: Context) -> Result:
    """Selective decoding at every tau: time, deviation and quality."""
    shop, scale, batch = context.workshop, context.scale, context.scale.batches[-1]
    plans = {"sequential": context.flow.plan("sequential")}
    plans |= {f"{tau:g}": shop.plan(context.model, "selective", batch, tau=tau) for tau in scale.taus}
    speed = timed(context, plans, batch, runs=1, repeats=scale.repeats)
    few = shop.few(context.model)
    counts = dict.fromkeys(plans, few)
    judged = context.model in scale.judged
    if judged and few < ENOUGH:
        most = shop.wanted(context.model)
        counts |= dict.fromkeys(("sequential", *(f"{tau:g}" for tau in JUDGED if tau in scale.taus)), most)
    full = judged and counts["sequential"] >= ENOUGH
    quality = judge(context, plans, counts, runs=1, full=full, scored=0)
    rows = [row | {"quality": quality[row["method"]]} for row in speed]
    path = context.picture("tolerance")
    everywhere = full and len(set(counts.values())) == 1
    key, label = ("fid", "FID") if everywhere else ("paired_relative", "paired distance")
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
        counts={
            "batch": batch,
            "timed_batches": scale.repeats,
            "quality_samples": counts["sequential"],
            "quality_samples_of_other_tau": few,
        },
        seeds={"noise": context.seed},
        pictures=(Picture(path.name, f"{context.model}: selective decoding from zeros. {WORDS[key]}"),),
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
                    (
                        Figure(model, f"{at}/quality/kid", "{:.4f}"),
                        " ± ",
                        Figure(model, f"{at}/quality/kid_std", "{:.4f}"),
                    ),
                    Figure(model, f"{at}/quality/paired_relative", "{:.4f}"),
                    Figure(model, f"{at}/largest", "{:.2g}"),
                    Figure(model, f"{at}/quality/samples", "{:,}"),
                )
            )
    note = (
        "Selective decoding from zeros, times of decoding alone, one run. Rows of equal counts decode the "
        f"same noise, so that small differences mean something. {UNEQUAL} ± of KID is over its subsets. "
        f"{BIASED}"
    )
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
        "slowly below 1 and faster above; 0.5 is the paper's choice. The plots have no numbers."
    ),
    minutes=lambda scale, model: 4.5 if model in scale.judged else 2.0,
)
