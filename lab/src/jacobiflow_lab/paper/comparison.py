"""The main comparison (Table 1), with more methods and the deviation of every method."""

from __future__ import annotations

from typing import Any

from jacobiflow_lab.paper.quality import NO_CLIP, judge
from jacobiflow_lab.paper.sampling import METHODS, PAPER_METHODS, PREVIOUS, TAU, all_plans
from jacobiflow_lab.paper.schema import Item, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import FID_BIAS, UNEQUAL_COUNTS, Column, Table
from jacobiflow_lab.paper.timing import PLAIN, other_seconds, timed


def run(task: Task) -> Result:
    """Time at every batch size in several runs, then quality of as many samples as the scale says."""
    session, scale = task.session, task.scale
    speed: list[dict[str, Any]] = []
    for batch in scale.batches:
        plans = all_plans(task, batch)
        rows = timed(task, plans, batch, runs=scale.runs, repeats=scale.repeats, plain=True)
        speed += whole_batches(rows, other_seconds(task, batch, runs=scale.runs, repeats=scale.repeats))
    full = task.model in scale.judged
    n = task.samples() if full else task.few_samples()
    beyond, scored = session.at_most(n, scale.beyond), session.at_most(n, scale.scored)
    counts = {method: n if method in PAPER_METHODS else beyond for method in METHODS}
    # Samples by the plans of the largest batch are scored.
    quality = judge(task, plans, counts, runs=scale.quality_runs, full=full, scored=scored)
    return Result(
        data={
            "tau": TAU,
            "speed": speed,
            "quality": quality,
            "plans": {name: [vars(method) for method in plan] for name, plan in plans.items()},
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
    )


def whole_batches(rows: list[dict[str, Any]], other: list[float]) -> list[dict[str, Any]]:
    """Rows with the seconds of whole batches, including noise and denoising, as the paper times them."""
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


SPEED = Table(
    title="Ours: speed",
    rows="speed",
    columns=(
        Column("method", "{method}"),
        Column("batch", "{batch}"),
        Column("seconds per batch", "{whole:.4f} ± {whole_spread:.4f}"),
        Column("over plain loop", "{whole_against_plain:.2f}x"),
        Column("over sequential", "{whole_speedup:.2f}x"),
        Column("decoding alone", "{seconds:.4f} ± {spread:.4f}"),
        Column("over plain loop", "{against_plain:.2f}x"),
        Column("over sequential", "{speedup:.2f}x"),
        Column("largest dev.", "{largest:.2g}"),
        Column("mean dev.", "{mean:.1g}"),
    ),
    note="Seconds of a batch with its noise and denoising, as the paper counts, and of decoding alone. ± is "
    "the largest deviation of a run from the mean of the runs. Plain loop: sequential decoding as in public "
    "code, a Python loop over torch operators with concatenated keys and values; the paper's speed-ups are "
    "over such a loop. Sequential: ours, which is compiled. Deviations are from it, for the same noise, on "
    "images in [-1, 1]. Uniform, selective: tau 0.5, from zeros, as in the paper. "
    f"{PREVIOUS.capitalize()}: the first guess is the block's input, our default. Windowed: a window of 16 "
    "positions with tolerance 0.01 in the first block, the others as in the row before. Auto: chosen for "
    "this machine and batch size.",
)
QUALITY = Table(
    title="Ours: quality",
    rows="quality",
    columns=(
        Column("method", "{#}"),
        Column("FID", "{fid:.2f} ± {spread/fid:.2f}", better="lower"),
        Column("KID", "{kid:.4f} ± {kid_std:.4f}", better="lower"),
        Column("paired", "{paired_relative:.4f}", better="lower"),
        Column("CLIP-IQA", "{clip_iqa:.2f} ± {spread/clip_iqa:.2f}", better="higher", empty=NO_CLIP),
        Column("BRISQUE", "{brisque:.2f} ± {spread/brisque:.2f}", better="lower"),
        Column("samples", "{samples:,}"),
    ),
    note=f"{FID_BIAS} ± of KID is over its subsets, of the others over runs; without ± there was one run. "
    "Paired: the mean distance of Inception features from sequential decoding of the same noise, divided by "
    "the mean distance between different samples. A dash under FID: too few samples. "
    f"{UNEQUAL_COUNTS} BRISQUE is of the first samples only (see the counts); it was made for photographs.",
)

ITEM = Item(
    name="comparison",
    run=run,
    tables=(SPEED, QUALITY),
    settings=lambda task: {"plain_loop": True},
    minutes=lambda scale, model: 9.0 if model in scale.judged else 2.5,
)
