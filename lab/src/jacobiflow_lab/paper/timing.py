"""All times of a model, from one run: Table 1, Table A4, Figure 5 and Figure 6 show parts of it.

Methods are compared within a backend: first all in torch, as the paper did, then all compiled.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from jacobiflow_lab.analysis.plots import save_bars, save_runtime
from jacobiflow_lab.analysis.runtime import PLAIN, runtimes
from jacobiflow_lab.paper.sampling import BEYOND, GUESSES, PAPER_METHODS, all_plans
from jacobiflow_lab.paper.schema import Doc, Item, Result
from jacobiflow_lab.paper.session import Task


def measure(task: Task) -> list[list[Doc]]:
    """Every method in every backend at every batch size; one list per backend and batch size."""
    scale, found = task.scale, []
    for backend in scale.backends:
        for batch in scale.batches:
            methods = scale.methods or (*PAPER_METHODS, *GUESSES[1:])
            if not scale.methods and backend == scale.backends[-1]:
                methods += BEYOND
            if not scale.methods and backend == "torch" and batch == scale.batches[-1]:
                methods += tuple(f"tau {tau:g}" for tau in scale.taus)
            task.session.note(f"{task.model}: timing batches of {batch}, {backend or 'fastest backend'}")
            plans = all_plans(task, batch, methods)
            options: dict[str, Any] = {"runs": scale.runs, "repeats": scale.repeats, "seed": task.seed}
            options |= {"backend": backend, "plain": backend == "torch", "labels": task.labels(batch)}
            found.append(runtimes(task.flow, batch, plans, **options))
    return found


def run(task: Task) -> Result:
    """Times of whole batches and of decoding alone, with the blocks of the largest batch size."""
    scale, groups = task.scale, measure(task)
    rows = [row for group in groups for row in compared(group, len(task.flow.blocks))]
    last = scale.batches[-1]
    largest = [group for group in groups if group[0]["batch"] == last]
    pictures = []
    for group in largest:
        backend = group[-1]["backend"]
        shown = [one for one in group if one["plan"] in PAPER_METHODS]
        draw = partial(save_runtime, shown, title=f"{task.model}: where the seconds go ({backend})")
        caption = f"{task.model}: seconds of a batch of {last}, {backend}. Shorter is better."
        name = "runtime" if group is largest[0] else f"runtime-{backend}"
        pictures.append(task.picture(name, caption, draw, section="runtime"))
    guesses = [row for row in rows if row["plan"] in GUESSES and row["batch"] == last]
    if not scale.methods:
        swept = [f"block {k}" for k in range(2, len(task.flow.blocks) + 1)]
        first = [row for row in guesses if row["backend"] == guesses[0]["backend"]]
        panels = [
            ("speed-up over sequential", ["decoding"], {r["plan"]: [r["speedup"]] for r in first}),
            ("sweeps (mean)", swept, {r["plan"]: [b["sweeps"] for b in r["layers"][1:]] for r in first}),
        ]
        bars = partial(save_bars, panels=panels, title=f"{task.model}: first guesses, tau {scale.tau:g}, torch")
        caption = f"{task.model}: speed-up (higher is better) and sweeps of blocks 2 to K by first guess."
        pictures.append(task.picture("initialisation", caption, bars, section="initialisation"))
    return Result(
        data={
            "tau": scale.tau,
            "K": len(task.flow.blocks),
            "L": task.flow.sequence_shape[0],
            "compare": [row for row in rows if row["plan"] in (*PAPER_METHODS, PLAIN)],
            "beyond": [row for row in rows if row["plan"] in BEYOND],
            "guesses": guesses,
            "guess_times": extremes(guesses[: len(GUESSES)]),
            "times": {
                name: {"smallest": times(rows, torch, scale.batches[0]), "largest": times(rows, torch, last)}
                for name, torch in (("torch", True), ("compiled", False))
            },
            "taus": [row | {"tau": row["plan"][4:]} for row in rows if row["plan"].startswith("tau ")],
            "blocks": {group[-1]["backend"]: blocks(group) for group in largest},
        },
        counts={"batches_per_run": scale.repeats, "runs": scale.runs},
        pictures=tuple(pictures),
    )


def compared(group: list[Doc], count: int) -> list[Doc]:
    """Rows with their speed-up over sequential decoding in the same backend, at the same batch size.

    Selective decoding of `count` blocks solves one of them sequentially and cannot exceed that speed-up.
    """
    exact = next(one for one in group if one["plan"] == "sequential")
    return [
        one
        | {
            "speedup": exact["seconds"] / one["seconds"],
            "whole_speedup": exact["whole"] / one["whole"],
            "ceiling": count if one["plan"].startswith(("selective", "tau ")) else None,
            "later_sweeps": sum(layer["sweeps"] for layer in one["layers"][1:]),
        }
        for one in group
    ]


def extremes(rows: list[Doc]) -> Doc:
    """The fastest and the slowest of these rows, and the largest deviation between runs."""
    seconds = [row["seconds"] for row in rows]
    return {"fastest": min(seconds), "slowest": max(seconds), "spread": max(row.get("spread", 0.0) for row in rows)}


def times(rows: list[Doc], torch: bool, batch: int) -> Doc | None:
    """What claims are about: the methods of one backend at one batch size. None: the backend did not run.

    Noise and denoising are the same for all methods, so that only decoding makes their difference uncertain.
    """
    named = {row["plan"]: row for row in rows if (row["backend"] == "torch") is torch and row["batch"] == batch}
    if not named:
        return None
    paper = {name: named[name]["whole"] for name in PAPER_METHODS}
    low, middle, high = sorted(paper.values())
    return paper | {
        "batch": batch,
        "speedup": named["selective"]["whole_speedup"],
        "spread": max(named[name]["spread"] for name in PAPER_METHODS),
        "difference": min(middle - low, high - middle),
        "first": named["sequential"]["layers"][0]["seconds"],
        "speedups": {name: row["speedup"] for name, row in named.items()},
    }


def blocks(group: list[Doc]) -> Doc:
    """Table A4 of one backend: seconds of each block, sequential beside selective."""
    pair = {one["plan"]: one for one in group if one["plan"] in ("sequential", "selective")}
    rows = [
        {name: one["layers"][i] | {"share": one["shares"][i]} for name, one in pair.items()}
        for i in range(len(group[-1]["layers"]))
    ]
    totals = {
        name: {"other": one["other"], "share": one["shares"][-1], "whole": one["whole"]} for name, one in pair.items()
    }
    speedup = pair["sequential"]["whole"] / pair["selective"]["whole"]
    found = {"rows": rows, "totals": totals, "speedup": speedup, "batch": group[0]["batch"]}
    return found | extremes([row["sequential"] for row in rows])


ITEM = Item(
    name="timing",
    run=run,
    minutes=lambda scale, model: 0.02 * scale.runs * scale.repeats * (10 if model in scale.judged else 3),
)
