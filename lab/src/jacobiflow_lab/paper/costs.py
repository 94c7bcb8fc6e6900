"""What decoding costs: sweeps (Table A3), run time (Table A4), memory (appendix on memory)."""

from __future__ import annotations

from dataclasses import replace

from jacobiflow_lab.analysis.memory import memory
from jacobiflow_lab.analysis.plots import save_memory, save_runtime, save_sweeps
from jacobiflow_lab.analysis.runtime import runtime
from jacobiflow_lab.analysis.sweeps import sweeps
from jacobiflow_lab.paper.sampling import TAU, all_plans
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import Column, Table

SWEEP_BATCHES = 4  # over which the maxima of batches are averaged
MEMORY_BATCH = 16  # the paper's


def run_sweeps(task: Task) -> Result:
    """Sweeps of each block at tau 0.5, from zeros as in the paper's algorithm and from our default."""
    batch = task.scale.batches[-1]
    n = SWEEP_BATCHES * batch
    z, condition = task.flow.noise(n, task.seed), task.condition(n)
    found = {
        f"{plan}, {init}": sweeps(task.flow, z, plan, tol=TAU, init=init, batch=batch, **condition)
        for plan in ("selective", "uniform")
        for init in ("zeros", "previous")
    }
    path = task.picture("sweeps")
    both = [found["selective, zeros"], found["uniform, zeros"]]
    save_sweeps(both, path, title=f"{task.model}: sweeps of each block, from zeros")
    return Result(
        data={"tau": TAU, "plans": {name: one.to_dict() for name, one in found.items()}},
        counts={"samples": n, "batch": batch},
        pictures=(Picture(path.name, f"{task.model}: mean over samples, and the slowest of each batch."),),
    )


def run_runtime(task: Task) -> Result:
    """Seconds of each block, and of noise, denoising and the rest."""
    scale, batch = task.scale, task.scale.batches[-1]
    condition = task.condition(batch)
    named = [
        replace(
            runtime(task.flow, batch, plan, repeats=scale.repeats, seed=task.seed, **condition), plan=method
        )
        for method, plan in all_plans(task, batch).items()
    ]
    path = task.picture("runtime")
    save_runtime(named, path, title=f"{task.model}: where the seconds go")
    rows = {one.plan: one.to_dict() for one in named}
    for row in rows.values():
        row["speedup"] = rows["sequential"]["total"] / row["total"]
    return Result(
        data={"tau": TAU, "plans": rows},
        counts={"batch": batch, "runs": scale.repeats},
        pictures=(Picture(path.name, f"{task.model}: a batch of {batch}."),),
    )


def run_memory(task: Task) -> Result:
    """Peak memory of decoding a batch of 16, each plan in a process of its own."""
    labels = task.labels(MEMORY_BATCH)
    found = memory(
        task.flow,
        n=MEMORY_BATCH,
        labels=None if labels is None else labels.tolist(),
        tol=TAU,
        seed=task.seed,
        device=str(task.device),
    )
    path = task.picture("memory")
    save_memory(found, path, title=f"{task.model}: memory of decoding")
    doc = found.to_dict()
    for peak in doc["peaks"]:
        peak["peak_mib"] = peak["peak"] / 2**20
    return Result(
        data=doc,
        counts={"batch": MEMORY_BATCH},
        pictures=(Picture(path.name, f"{task.model}: beyond weights and code."),),
    )


def sweeps_table(title: str, key: str, note: str) -> Table:
    """One row per plan, one column per block."""
    columns = (
        Column("plan, first guess", "{#}"),
        Column("block *", f"{{layers/*/{key}:.1f}}", over="layers", empty=""),
    )
    return Table(title=f"Ours: {title}", rows="plans", columns=columns, note=note)


MEAN_SWEEPS = sweeps_table(
    "mean over samples",
    "mean",
    "Block 1 is next to the noise. Selective plans decode it sequentially, which counts as T - 1 sweeps. "
    "Previous: the first guess is the block's input.",
)
SLOWEST_SWEEPS = sweeps_table(
    "the slowest sample of a batch",
    "batch_max",
    "What a stopping test over the whole batch would need, mean over batches.",
)
RUNTIME_TABLE = Table(
    rows="plans/selective/layers",
    columns=(
        Column("block", "{#}"),
        Column("sequential s", "{/plans/sequential/layers/#/seconds:.3f}"),
        Column("share", "{/plans/sequential/shares/#:.1%}"),
        Column("selective s", "{seconds:.3f}"),
        Column("share", "{/plans/selective/shares/#:.1%}"),
        Column("sweeps", "{sweeps:.1f}"),
    ),
    footers=(
        "other | {plans/sequential/other:.3f} | {plans/sequential/shares/-1:.1%} | "
        "{plans/selective/other:.3f} | {plans/selective/shares/-1:.1%} | –",
        "total | {plans/sequential/total:.3f} | 100% | {plans/selective/total:.3f} | 100% | "
        "{plans/selective/speedup:.2f}x",
    ),
    note="Other: noise, denoising, work between blocks and transfers between devices. Medians of the runs. "
    "Sequential is ours, compiled; selective starts from zeros. The picture has the other methods.",
)
MEMORY_TABLE = Table(
    rows="peaks",
    columns=(
        Column("method", "{plan}"),
        Column("cache", "{cache}"),
        Column("MiB beyond weights and code", "{peak_mib:.1f}", better="lower"),
    ),
    note=f"Batch {MEMORY_BATCH}. Sequential decoding keeps keys and values; sweeps can do without. Our "
    "selective decoding keeps them by default; `cache=False` turns this off and is slower.",
)

SWEEPS = Item(
    name="sweeps",
    run=run_sweeps,
    tables=(MEAN_SWEEPS, SLOWEST_SWEEPS),
    minutes=lambda scale, model: 0.1,
)
RUNTIME = Item(
    name="runtime",
    run=run_runtime,
    tables=(RUNTIME_TABLE,),
)
MEMORY = Item(
    name="memory",
    run=run_memory,
    tables=(MEMORY_TABLE,),
)
