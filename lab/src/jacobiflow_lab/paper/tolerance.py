"""The ablation of the stopping threshold (Figure 5)."""

from __future__ import annotations

from jacobiflow_lab.paper import figures
from jacobiflow_lab.paper.quality import judge
from jacobiflow_lab.paper.sampling import TAU, plan_for
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import FID_BIAS, UNEQUAL_COUNTS, Column, Table
from jacobiflow_lab.paper.timing import timed

SAMPLES_FOR_FID = 1000
CLAIMED_TAUS = (TAU, 2.0)  # the paper's claims about quality are about these: as many samples as Table 1
CAPTIONS = {
    "fid": f"{FID_BIAS} KID is in the table.",
    "paired_relative": "Paired distance: of Inception features from sequential decoding of the same noise, "
    "divided by the distance between different samples. It says how much changes, not whether it is worse.",
}


def run(task: Task) -> Result:
    """Selective decoding at every tau: time, deviation and quality."""
    scale, batch = task.scale, task.scale.batches[-1]
    plans = {"sequential": task.flow.plan("sequential")}
    plans |= {f"{tau:g}": plan_for(task, "selective", batch, tau=tau) for tau in scale.taus}
    speed = timed(task, plans, batch, runs=1, repeats=scale.repeats)
    few = task.few_samples()
    counts = dict.fromkeys(plans, few)
    judged = task.model in scale.judged
    if judged and few < SAMPLES_FOR_FID:
        claimed = (f"{tau:g}" for tau in CLAIMED_TAUS if tau in scale.taus)
        counts |= dict.fromkeys(("sequential", *claimed), task.samples())
    full = judged and counts["sequential"] >= SAMPLES_FOR_FID
    quality = judge(task, plans, counts, runs=1, full=full, scored=0)
    rows = [row | {"quality": quality[row["method"]]} for row in speed]
    path = task.picture("tolerance")
    everywhere = full and len(set(counts.values())) == 1
    key, label = ("fid", "FID") if everywhere else ("paired_relative", "paired distance")
    figures.quality_and_time(
        path,
        scale.taus,
        (label, [row["quality"][key] for row in rows[1:]]),
        [row["seconds"] for row in rows[1:]],
        exact=(rows[0]["quality"][key], rows[0]["seconds"]),
        title=f"{task.model}: quality and time against tau",
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
        pictures=(Picture(path.name, f"{task.model}: selective decoding from zeros. {CAPTIONS[key]}"),),
    )


TOLERANCE = Table(
    rows="rows",
    columns=(
        Column("tau", "{method}"),
        Column("seconds", "{seconds:.3f}"),
        Column("speed-up", "{speedup:.2f}x"),
        Column("FID", "{quality/fid:.2f}", better="lower"),
        Column("KID", "{quality/kid:.4f} ± {quality/kid_std:.4f}", better="lower"),
        Column("paired", "{quality/paired_relative:.4f}", better="lower"),
        Column("largest dev.", "{largest:.2g}"),
        Column("samples", "{quality/samples:,}"),
    ),
    note="Selective decoding from zeros, times of decoding alone, one run. Rows of equal counts decode the "
    f"same noise, so that small differences are meaningful. {UNEQUAL_COUNTS} ± of KID is over its subsets. "
    f"{FID_BIAS}",
)

ITEM = Item(
    name="tolerance",
    run=run,
    tables=(TOLERANCE,),
    minutes=lambda scale, model: 4.5 if model in scale.judged else 2.0,
)
