"""The main comparison (Table 1), with two more methods and the deviation of every method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jacobiflow_lab.paper import paper_figures
from jacobiflow_lab.paper.item import (
    BIASED,
    UNEQUAL,
    Cell,
    Docs,
    Figure,
    Item,
    Result,
    Table,
    missing_rows,
    present,
)
from jacobiflow_lab.paper.quality import NO_CLIP, judge
from jacobiflow_lab.paper.timing import PLAIN, rest, timed
from jacobiflow_lab.paper.workshop import METHODS, PREVIOUS, TAU, Context

PAPER = ("sequential", "uniform", "selective")  # the methods of its table


def run(context: Context) -> Result:
    """Time at every batch size in three runs, then quality of as many samples as the scale says."""
    shop, scale = context.workshop, context.scale
    speed: list[dict[str, Any]] = []
    for batch in scale.batches:
        plans = {method: shop.plan(context.model, method, batch, tau=TAU) for method in METHODS}
        rows = timed(context, plans, batch, runs=scale.runs, repeats=scale.repeats, plain=True)
        speed += whole(rows, rest(context, batch, runs=scale.runs, repeats=scale.repeats))
    full = context.model in scale.judged
    n = shop.wanted(context.model) if full else shop.few(context.model)
    beyond, scored = shop.at_most(n, scale.beyond), shop.at_most(n, scale.scored)
    counts = {method: n if method in PAPER else beyond for method in METHODS}
    # The plans of the largest batch are those whose samples are judged.
    quality = judge(context, plans, counts, runs=scale.quality_runs, full=full, scored=scored)
    return Result(
        data={
            "tau": TAU,
            "speed": speed,
            "quality": quality,
            "plans": {name: [vars(m) for m in plan] for name, plan in plans.items()},
        },
        counts={
            "timed_batches": scale.runs * scale.repeats,
            "runs": scale.runs,
            "quality_samples": n,
            "quality_samples_beyond_the_paper": beyond,
            "scored_samples": scored,
            "quality_runs": scale.quality_runs,
            "real_images": quality["sequential"]["real"],
        },
        seeds={"noise": context.seed},
    )


def whole(rows: list[dict[str, Any]], other: list[float]) -> list[dict[str, Any]]:
    """Rows with the seconds of whole batches, noise and denoising with them, as the paper times them."""
    found = []
    for row in rows:
        runs = [a + b for a, b in zip(row["runs"], other, strict=True)]
        mean = sum(runs) / len(runs)
        found.append(row | {"whole": mean, "whole_spread": max(abs(run - mean) for run in runs)})
    base = {row["method"]: row["whole"] for row in found}
    for row in found:
        row["whole_speedup"] = base["sequential"] / row["whole"]
        row["whole_against_plain"] = base[PLAIN] / row["whole"]
    return found


def tables(docs: Docs) -> list[Table]:
    """Speed at each batch size, then quality."""
    return [speed_table(docs), quality_table(docs)]


def speed_table(docs: Docs) -> Table:
    """Seconds, speed-up, deviation."""
    head = (
        "model",
        "batch",
        "method",
        "seconds a batch",
        "over plain loop",
        "over sequential",
        "of them decoding",
        "over plain loop",
        "over sequential",
        "largest dev.",
        "mean dev.",
    )
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        batch = None
        for i, row in enumerate(docs[model]["data"]["speed"]):
            at = f"speed/{i}"
            new, batch = row["batch"] != batch, row["batch"]
            rows.append(
                (
                    model if i == 0 else "",
                    Figure(model, f"{at}/batch", "{}") if new else "",
                    row["method"],
                    (
                        Figure(model, f"{at}/whole", "{:.4f}"),
                        " ± ",
                        Figure(model, f"{at}/whole_spread", "{:.4f}"),
                    ),
                    (Figure(model, f"{at}/whole_against_plain"), "x"),
                    (Figure(model, f"{at}/whole_speedup"), "x"),
                    (
                        Figure(model, f"{at}/seconds", "{:.4f}"),
                        " ± ",
                        Figure(model, f"{at}/spread", "{:.4f}"),
                    ),
                    (Figure(model, f"{at}/against_plain"), "x"),
                    (Figure(model, f"{at}/speedup"), "x"),
                    Figure(model, f"{at}/largest", "{:.2g}"),
                    Figure(model, f"{at}/mean", "{:.1g}"),
                )
            )
    note = (
        "Seconds of a batch with its noise and denoising, as the paper counts, and of decoding alone. ± is "
        "the largest deviation of a run from the mean of the runs. Plain loop: sequential decoding as "
        "public code does it, a Python loop over torch's operators with concatenated keys and values; the "
        "paper's speed-ups are over such a loop. Sequential: ours, which is compiled. Deviations are from "
        "it, of the same noise, on images in [-1, 1]. Uniform, selective: tau 0.5, from zeros, as in the "
        f"paper. {PREVIOUS.capitalize()}: the first guess is what the layer is given, our default. Windowed: "
        "windows of 16 positions, closed at 0.01, in the first block, the others as in the row before. Auto: "
        "tuned for this machine and batch."
    )
    return Table(title="Ours: speed", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)


def quality_table(docs: Docs) -> Table:
    """FID, KID, paired distance, CLIP-IQA, BRISQUE."""
    head = ("model", "method", "FID ↓", "KID ↓", "paired ↓", "CLIP-IQA ↑", "BRISQUE ↓", "samples")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, (method, row) in enumerate(docs[model]["data"]["quality"].items()):
            at = f"quality/{method}"
            rows.append(
                (
                    model if i == 0 else "",
                    method,
                    spread(model, at, row, "fid"),
                    (
                        Figure(model, f"{at}/kid", "{:.4f}"),
                        " ± ",
                        Figure(model, f"{at}/kid_std", "{:.4f}"),
                    ),
                    Figure(model, f"{at}/paired_relative", "{:.4f}"),
                    spread(model, at, row, "clip_iqa") if row["clip_iqa"] is not None else NO_CLIP,
                    spread(model, at, row, "brisque"),
                    Figure(model, f"{at}/samples", "{:,}"),
                )
            )
    note = (
        f"{BIASED} ± of KID is over its subsets, of the others over runs; where there is none, it was one "
        "run. Paired: the mean distance of Inception features to sequential decoding of the same noise, in "
        "units of the mean distance between different samples. A dash under FID: too few samples for it. "
        f"{UNEQUAL} BRISQUE is of the first samples only (see the counts); it was made for photographs."
    )
    return Table(title="Ours: quality", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)


def spread(model: str, at: str, row: dict[str, Any], key: str) -> Cell:
    """A figure, with its deviation if there was more than one run."""
    value = Figure(model, f"{at}/{key}")
    return (value, " ± ", Figure(model, f"{at}/spread/{key}")) if row["runs"] > 1 else value


ITEM = Item(
    name="comparison",
    title="Comparison of decoders",
    shows="Table 1",
    models=lambda scale: scale.images,
    run=run,
    tables=tables,
    theirs=(paper_figures.comparison(),),
    settings=lambda context: {"plain_loop": True},
    minutes=lambda scale, model: 9.0 if model in scale.judged else 2.5,
)
