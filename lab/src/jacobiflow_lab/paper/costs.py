"""What decoding costs: sweeps (Table A3), run time (Table A4), memory (appendix on memory)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jacobiflow_lab.analysis.memory import memory
from jacobiflow_lab.analysis.plots import save_memory, save_runtime, save_sweeps
from jacobiflow_lab.analysis.runtime import runtime
from jacobiflow_lab.analysis.sweeps import doubt, sweeps
from jacobiflow_lab.paper import paper_figures
from jacobiflow_lab.paper.item import Cell, Docs, Figure, Item, Picture, Result, Table, missing_rows, present
from jacobiflow_lab.paper.workshop import METHODS, TAU, Context

BATCHES = 4  # over which batch maxima are averaged
MEMORY_BATCH = 16  # the paper's
SHOWN = ("sequential", "selective")  # the paper's columns


def run_sweeps(context: Context) -> Result:
    """Sweeps of each layer at tau 0.5, from zeros as the paper's algorithm starts and from our default."""
    batch = context.scale.batches[-1]
    n = BATCHES * batch
    condition = context.condition(n)
    z = context.flow.noise(n, context.seed)
    found = {
        f"{plan}, {init}": sweeps(context.flow, z, plan, tol=TAU, init=init, batch=batch, **condition)
        for plan in ("selective", "uniform")
        for init in ("zeros", "previous")
    }
    path = context.picture("sweeps")
    both = [found["selective, zeros"], found["uniform, zeros"]]
    save_sweeps(both, path, title=f"{context.model}: sweeps of each layer, from zeros")
    return Result(
        data={
            "tau": TAU,
            "plans": {name: one.to_dict() for name, one in found.items()},
            "doubt": doubt(found["uniform, zeros"]),
        },
        counts={"samples": n, "batch": batch},
        seeds={"noise": context.seed},
        pictures=(Picture(path.name, f"{context.model}: mean over samples, and the slowest of each batch."),),
    )


def run_runtime(context: Context) -> Result:
    """Seconds of each layer, and of noise, denoising and the rest."""
    batch = context.scale.batches[-1]
    condition = context.condition(batch)
    found = {}
    for method in METHODS:
        plan = context.workshop.plan(context.model, method, batch, tau=TAU)
        one = runtime(
            context.flow, batch, plan, repeats=context.scale.repeats, seed=context.seed, **condition
        )
        found[method] = one
    path = context.picture("runtime")
    named = [replace(one, plan=method) for method, one in found.items()]
    save_runtime(named, path, title=f"{context.model}: where the seconds go")
    rows = {one.plan: one.to_dict() for one in named}
    for row in rows.values():
        row["speedup"] = rows["sequential"]["total"] / row["total"]
    return Result(
        data={"tau": TAU, "plans": rows},
        counts={"batch": batch, "runs": context.scale.repeats},
        seeds={"noise": context.seed},
        pictures=(Picture(path.name, f"{context.model}: a batch of {batch}."),),
    )


def run_memory(context: Context) -> Result:
    """Peak memory of decoding a batch of 16, each plan in a process of its own."""
    labels = context.labels(MEMORY_BATCH)
    found = memory(
        context.flow,
        n=MEMORY_BATCH,
        labels=None if labels is None else labels.tolist(),
        tol=TAU,
        seed=context.seed,
        device=str(context.workshop.device),
    )
    path = context.picture("memory")
    save_memory(found, path, title=f"{context.model}: memory of decoding")
    doc = found.to_dict()
    for peak in doc["peaks"]:
        peak["peak_mib"] = peak["peak"] / 2**20
    return Result(
        data=doc,
        counts={"batch": MEMORY_BATCH},
        seeds={"noise": context.seed},
        pictures=(Picture(path.name, f"{context.model}: beyond weights and code."),),
    )


def sweeps_tables(docs: Docs) -> list[Table]:
    """A row for each layer, as in the paper; then the mean of batch maxima."""
    there = present(docs)
    most = max((len(docs[m]["data"]["plans"]["selective, zeros"]["layers"]) for m in there), default=0)
    head = ("layer", *(there or ("",)))

    def table(title: str, plan: str, key: str, note: str = "") -> Table:
        rows: list[Sequence[Cell]] = [
            (str(k + 1), *(Figure(m, f"plans/{plan}/layers/{k}/{key}", "{:.1f}") for m in there))
            for k in range(most)
        ]
        return Table(title=title, head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)

    return [
        table(
            "Ours: selective, from zeros, mean over samples",
            "selective, zeros",
            "mean",
            "Layer 1 is next to the noise and decoded sequentially, which counts T - 1. " + doubts(docs),
        ),
        table("Ours: the same, slowest of a batch", "selective, zeros", "batch_max"),
        table("Ours: selective, from the layer's input", "selective, previous", "mean"),
        table("Ours: all layers swept, from zeros", "uniform, zeros", "mean"),
        table(
            "Ours: all layers swept, from zeros, slowest of a batch",
            "uniform, zeros",
            "batch_max",
            "What a stopping test over the whole batch would need, mean over batches.",
        ),
    ]


def doubts(docs: Docs) -> str:
    """Which models may be called untrained, by the number of sweeps of their first block."""
    found = {m: docs[m]["data"]["doubt"] for m in present(docs)}
    return " ".join(f"{model}: {words}." for model, words in found.items() if words)


def runtime_tables(docs: Docs) -> list[Table]:
    """Seconds and shares of sequential and selective, as in the paper; other methods are in the picture."""
    head = ("model", "layer", "sequential s", "share", "selective s", "share", "sweeps")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        layers = len(docs[model]["data"]["plans"]["selective"]["layers"])
        for k in range(layers + 1):
            cells: list[Cell] = []
            for plan in SHOWN:
                at = f"plans/{plan}"
                where = f"{at}/layers/{k}/seconds" if k < layers else f"{at}/other"
                cells += [Figure(model, where, "{:.3f}"), Figure(model, f"{at}/shares/{k}", "{:.1%}")]
            last = Figure(model, f"plans/selective/layers/{k}/sweeps", "{:.1f}") if k < layers else "–"
            rows.append((model if k == 0 else "", str(k + 1) if k < layers else "other", *cells, last))
        total = [Figure(model, f"plans/{plan}/total", "{:.3f}") for plan in SHOWN]
        speedup = (Figure(model, "plans/selective/speedup"), "x")
        rows.append(("", "total", total[0], "100%", total[1], "100%", speedup))
    note = (
        "Other: drawing noise, denoising, and what stands between layers, between devices too. Medians of "
        "the runs. Sequential is ours, compiled; selective starts from zeros."
    )
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


def memory_tables(docs: Docs) -> list[Table]:
    """Mebibytes of each plan."""
    head = ("model", "method", "cache", "MiB beyond weights and code")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, peak in enumerate(docs[model]["data"]["peaks"]):
            rows.append(
                (
                    model if i == 0 else "",
                    Figure(model, f"peaks/{i}/plan"),
                    "yes" if peak["cache"] else "no",
                    Figure(model, f"peaks/{i}/peak_mib", "{:.1f}"),
                )
            )
    note = (
        f"Batch {MEMORY_BATCH}. Sequential decoding keeps keys and values; sweeps can do without. Our "
        "selective decoding keeps them unless told not to (`cache=False`), which is slower."
    )
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


SWEEPS = Item(
    name="sweeps",
    title="Sweeps a layer",
    shows="Table A3",
    models=lambda scale: scale.images,
    run=run_sweeps,
    tables=sweeps_tables,
    theirs=(paper_figures.sweeps(),),
    minutes=lambda scale, model: 0.1,
)
RUNTIME = Item(
    name="runtime",
    title="Run time by layer",
    shows="Table A4",
    models=lambda scale: scale.images,
    run=run_runtime,
    tables=runtime_tables,
    theirs=(paper_figures.runtime(),),
    minutes=lambda scale, model: 0.2,
)
MEMORY = Item(
    name="memory",
    title="Memory",
    shows="Appendix on memory",
    models=lambda scale: scale.images,
    run=run_memory,
    tables=memory_tables,
    theirs=(paper_figures.memory(),),
    minutes=lambda scale, model: 0.2,
)
