"""What decoding costs besides time: sweeps (Table A3) and memory (appendix on memory)."""

from __future__ import annotations

import statistics
from functools import partial

from jacobiflow.flows.tarflow import TarFlow
from jacobiflow_lab.analysis.memory import memory
from jacobiflow_lab.analysis.plots import save_lines, save_memory, save_sweeps
from jacobiflow_lab.analysis.runtime import runtimes
from jacobiflow_lab.analysis.sweeps import Sweeps, sweeps
from jacobiflow_lab.paper.assets import random_flow
from jacobiflow_lab.paper.schema import Doc, Item, Result
from jacobiflow_lab.paper.session import Task

AFHQ_BLOCKS = 8  # the paper's
AFHQ_SWEEPS = (6.6, 6.0, 5.2, 5.0, 5.9, 4.5, 4.0)  # of its blocks 2 to 8, Table A3


def run_sweeps(task: Task) -> Result:
    """Sweeps of each block at tau, from zeros as in the paper's algorithm and from our default."""
    scale, n = task.scale, task.scale.swept
    z, batch = task.flow.noise(n, task.seed), min(task.scale.batches[-1], n)
    found = {
        f"{plan}, {init}" if init else plan: sweeps(
            task.flow, z, plan, tol=scale.tau, init=init, batch=batch, labels=task.labels(n)
        )
        for plan in ("selective", "uniform")
        for init in scale.inits
    }
    both = [one for name, one in found.items() if name.endswith(scale.inits[0] or name)]
    draw = partial(save_sweeps, both, title=f"{task.model}: sweeps of each block")
    caption = f"{task.model}: mean over samples, and the slowest of each batch. Fewer is better."
    return Result(
        data={"tau": scale.tau, "plans": {name: one.to_dict() | extremes(one) for name, one in found.items()}},
        counts={"samples": n, "batch": batch},
        pictures=(task.picture("sweeps", caption, draw),),
    )


def extremes(found: Sweeps) -> Doc:
    """What claims are about: sweeps of the first two blocks and of the others, and the largest error."""
    first, second, *later = means = [layer.mean for layer in found.layers] + [0.0] * (len(found.layers) == 1)
    return {
        "first": first,
        "second": second,
        "most": max(means[1:]),
        "median": statistics.median(means[1:]),
        "most_after_second": max(later, default=0.0),
        "error": max(layer.error for layer in found.layers),
    }


def run_memory(task: Task) -> Result:
    """Peak memory of decoding a batch of 16, each plan in a process of its own."""
    batch = task.scale.memory_batch
    labels = None if (own := task.labels(batch)) is None else own.tolist()
    found = memory(task.flow, n=batch, labels=labels, tol=task.scale.tau, seed=task.seed)
    draw = partial(save_memory, found, title=f"{task.model}: memory of decoding")
    picture = task.picture("memory", f"{task.model}: beyond weights and code. Less is better.", draw)
    return Result(data=found.to_dict(), counts={"batch": batch}, pictures=(picture,))


def run_lengths(task: Task) -> Result:
    """Peak memory against the length of the sequence, with two blocks of the paper's CIFAR shape."""
    rows = []
    for side in task.scale.memory_sides:
        flow = random_flow(task.scale.random[task.model] | {"image_size": side, "blocks": 2})
        task.session.note(f"memory at {flow.sequence_shape[0]} positions")
        found = memory(flow.to(task.device), n=task.scale.memory_batch, tol=task.scale.tau)
        peaks = found.to_dict()["peaks"]
        ratio = peaks[2]["mib"] / peaks[0]["mib"] if peaks[0]["mib"] else None
        rows.append({"L": flow.sequence_shape[0], "peaks": peaks, "ratio": ratio})
    lengths = [row["L"] for row in rows]
    lines = {
        f"{peak['plan']}, cache: {peak['cache']}": [row["peaks"][i]["mib"] for row in rows]
        for i, peak in enumerate(rows[0]["peaks"])
    }
    title, labels = "memory of decoding against the length", ("positions L", "MiB")
    picture = task.picture(
        "memory-length",
        "Random weights, two blocks. Less is better.",
        lambda path: save_lines(path, lengths, lines, title=title, labels=labels, log=True),
        section="memory",
    )
    return Result(data={"rows": rows}, counts={"batch": task.scale.memory_batch}, pictures=(picture,))


def run_largest(task: Task) -> Result:
    """One block of the paper's largest model at batch 1: sequential decoding against one sweep, per backend.

    All K blocks have this shape, so that sequential decoding takes K times as long. Uniform decoding needs
    the sweeps of blocks 2 to K, assumed to be the paper's, and those of block 1, which decide who wins.
    """
    flow, rows = task.flow, []
    assert isinstance(flow, TarFlow)
    for backend in task.scale.backends:
        plans = {"sequential": flow.plan("sequential"), "sweep": flow.plan("uniform", tol=1e9, init="zeros")}
        repeats = max(1, task.scale.repeats // 3)
        exact, swept = runtimes(flow, 1, plans, backend=backend, repeats=repeats, denoise=False)
        sweep = swept["seconds"] / swept["layers"][0]["sweeps"]
        one, later = exact["seconds"], sum(AFHQ_SWEEPS)
        rows.append(
            {
                "backend": exact["backend"],
                "sequential": AFHQ_BLOCKS * one,
                "sweep": sweep,
                "later_sweeps": later,
                "loses_above": AFHQ_BLOCKS * one / sweep - later,
                "selective": (AFHQ_BLOCKS * one) / (one + later * sweep),
                "K": AFHQ_BLOCKS,
            }
        )
    return Result(data={"L": flow.sequence_shape[0], "rows": rows}, counts={"batch": 1})


SWEEPS = Item(name="sweeps", run=run_sweeps, minutes=lambda scale, model: 0.3)
MEMORY = Item(name="memory", run=run_memory, minutes=lambda scale, model: 0.5)
LENGTHS = Item(
    name="memory-length", run=run_lengths, models=lambda scale: ("random-cifar",), minutes=lambda scale, model: 3.0
)
LARGEST = Item(
    name="largest", run=run_largest, models=lambda scale: ("random-afhq",), minutes=lambda scale, model: 4.0
)
