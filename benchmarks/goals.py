"""What decoding should reach, what it reaches now, what it reached before, and the machine's bound: one table.

A bound is max(bytes / reading speed, operations / peak) of a call, summed over positions for sequential decoding; both
limits are measured in the same run (machine.c). "before" is an older commit in the same sitting (before.py). Counts
and races come from the records of other sections: run `auto`, `tarflow`, `series` and `guesses` first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks import before
from benchmarks.before import CALLS, made, seconds_of, tame
from benchmarks.harness import ROOT, Row, documents
from benchmarks.kernels import Case, Machine
from jacobiflow.flows.compare import plain_tarflow

BLOCKS = 6
Seconds = dict[str, float]


def row(what: str, batch: int, goal: float, now: float, *, least: bool = False, **about: float | None) -> Row:
    """A line of the table. goal: at most so much, or at least. about: before, bound, seconds, deviation."""
    met = now >= goal if least else now <= goal
    limit = f"{'at least' if least else 'at most'} {goal:.3g}x"
    ordered = {name: about.get(name) for name in ("before", "bound", "seconds", "bound_seconds", "deviation")}
    found: Row = {"what": what, "batch": batch, "goal": limit, "now": now, "met": "yes" if met else "no", **ordered}
    print("   ", found, flush=True)
    return found


def calls(case: Case, names: tuple[str, ...]) -> dict[str, Callable[[], object]]:
    """As `before.older_calls`; for the AFHQ configuration also 16 positions in bfloat16."""
    batch, block = case.batch, case.flow.bound_blocks(case.batch, backend="c")[0]
    length, engine, store = block.length, block.engine, block.engine.new_cache(batch)
    x, z = torch.randn(2, batch, *case.flow.latent_shape)
    engine.params(x, 1, length // 2, store)
    count = -(-batch // (engine.rows or batch))
    parts = [
        (engine.select(rows), x[rows], z[rows], x.new_empty(len(rows), length), engine.new_cache(len(rows)))
        for rows in torch.arange(batch).tensor_split(count)
    ]

    def solve() -> None:
        for own, known, latent, slopes, cache in parts:
            own.solve(known, latent, slopes, 1, length, cache)

    def call(name: str) -> Callable[[], object]:
        if name == "sequential":
            return solve
        width = length - 1 if name == "whole" else int(name)
        return partial(engine.params, x, 1 if name == "whole" else length // 2, width, store)

    runs = {name: call(name) for name in names}
    rough = engine.rough()
    if case.flow.config.width == 768 and rough is not None:
        cache = rough.new_cache(batch)
        rough.params(x, 1, length // 2, cache)
        runs["16 in bfloat16"] = partial(rough.params, x, length // 2, 16, cache)
    return runs


def bounds(case: Case, names: tuple[str, ...]) -> Seconds:
    """The least seconds of these calls."""
    length, found = case.flow.config.length, Seconds()
    for name in names:
        width = {"whole": length - 1, "sequential": 1}.get(name) or int(name)
        starts = {"whole": [1], "sequential": range(1, length)}.get(name, [length // 2])
        found[name] = sum(case.limits(start, width)[2] for start in starts)
    return found


def kernels(now: Seconds, bound: Seconds, old: Seconds) -> Iterator[Row]:
    """Single calls beside the machine's limits, and beside one position."""

    def beside_bound(what: str, key: str, goal: float) -> Row:
        ratios = now[key] / bound[key], old[key] / bound[key] if old else None
        shown = {"seconds": now[key], "bound_seconds": bound[key]}
        return row(what, int(key.split("/")[1]), goal, ratios[0], before=ratios[1], bound=1.0, **shown)

    def beside_one(what: str, key: str, goal: float, base: str) -> Row:
        known = old[key] / old[base] if old and key in old else None
        least = bound.get(key)
        ratio = None if least is None else least / bound[base]
        shown = {"before": known, "bound": ratio, "seconds": now[key], "bound_seconds": least}
        return row(what, 1, goal, now[key] / now[base], **shown)

    for batch, goal in ((1, 1.5), (16, 1.3)):
        yield beside_bound("one whole sweep of mnist's geometry / bound", f"mnist/{batch}/whole", goal)
    for batch, goal in ((1, 1.1), (16, 2.0), (64, 1.8)):
        yield beside_bound("sequential, mnist's geometry / bound", f"mnist/{batch}/sequential", goal)
    yield beside_one("16 positions, AFHQ configuration / one", "afhq/1/16", 2.0, "afhq/1/1")
    if "afhq/1/16 in bfloat16" in now:
        yield beside_one("the same in bfloat16 / one in float32", "afhq/1/16 in bfloat16", 1.2, "afhq/1/1")
    yield beside_one("8 positions, CIFAR configuration / one", "cifar/1/8", 1.6, "cifar/1/1")
    for shape in ("cifar", "afhq"):
        few = [k for k in bound if k.startswith(f"{shape}/") and 2 <= row_count(k) <= 64]
        worst = max(few, key=lambda k: now[k] / bound[k])
        batch, width = worst.split("/")[1:]
        yield beside_bound(f"2 to 64 rows, {shape.upper()}, worst: {batch} x {width} / bound", worst, 1.6)
    for batch in (1, 4, 16):
        yield beside_bound("one whole sweep, CIFAR configuration / bound", f"cifar/{batch}/whole", 1.4)
    for batch in (1, 4, 16, 64):
        yield beside_bound("sequential, CIFAR configuration / bound", f"cifar/{batch}/sequential", 1.3)


def row_count(key: str) -> int:
    """Rows of a sweep, of all samples together; 0 for whole sweeps and sequential decoding."""
    _, batch, width = key.split("/")
    return int(batch) * int(width) if width.isdigit() else 0


def selective(old: Seconds, turns: int) -> Iterator[Row]:
    """`mnist`: the paper's plan against the sequential decoding of before."""
    flow = jf.load("mnist")
    for n, goal in ((1, 1.8), (16, 1.2)):
        z, labels = flow.noise(n, seed=0), torch.arange(n) % 10
        run: dict[str, Callable[[], Tensor]] = {
            name: lambda z=z, labels=labels, name=name: flow.decode(z, name, labels=labels).x
            for name in ("sequential", "selective")
        }
        took, off = seconds_of(run, turns), (run["selective"]() - run["sequential"]()).abs().max().item()
        known = old.get(f"mnist flow/{n}/sequential", took["sequential"])
        was = known / old[f"mnist flow/{n}/selective"] if old else None
        about = {"before": was, "seconds": took["selective"], "deviation": off}
        yield row(
            "mnist, sequential of before / selective, tol 0.5", n, goal, known / took["selective"], least=True, **about
        )


def five_sweeps(sequential: float, bound: float, turns: int) -> Iterator[Row]:
    """AFHQ configuration, one block: sequential decoding against whole sweeps to the change that five leave."""
    flow = tame("afhq", 1)
    block, z = flow.bound_blocks(1)[0], flow.noise(1, seed=0)
    exact = jf.decode(block, z, jf.Method(width=1)).x
    left = jf.decode(block, z, jf.Method(max_sweeps=5), on_failure="return")
    tol = max(1.001 * float(left.stats.blocks[0].update.max()), 1e-6)
    for precision, goal in (("float32", 3.2), ("mixed", 4.0)):
        method = jf.Method(tol=tol, precision=precision)  # type: ignore[arg-type]
        out = jf.decode(block, z, method)
        stats, off = out.stats.blocks[0], (out.x - exact).abs().max().item()
        rough = f"{int(stats.guess_sweeps.max())} in bfloat16 + " * (precision == "mixed")
        what = f"AFHQ block, sequential / sweeps ({rough}{int(stats.sweeps.max())} in float32, tol {tol:.2g})"
        took = seconds_of({precision: partial(jf.decode, block, z, method)}, min(turns, 3))[precision]
        most = sequential / (5 * bound) if precision == "float32" else None
        yield row(what, 1, goal, sequential / took, least=True, bound=most, seconds=took, deviation=off)


def cifar(old: Seconds, turns: int) -> Iterator[Row]:
    """CIFAR configuration: the best of sequential decoding and plans of five sweeps, against the plain loop."""
    flow, five = tame("cifar", BLOCKS), jf.Method(max_sweeps=5)
    plans = {
        "sequential": jf.Plan.sequential(BLOCKS),
        "first": jf.Plan((jf.Method(width=1), *[five] * (BLOCKS - 1))),
        "five": jf.Plan((five,) * BLOCKS),
    }
    words = {"sequential": "sequential", "first": "sequential, then 5 sweeps a block", "five": "5 sweeps a block"}
    for n, gain in ((1, 1.7), (4, 1.5), (16, 1.5)):
        z = flow.noise(n, seed=0)
        runs: dict[str, Callable[[], Tensor]] = {"plain": partial(plain_tarflow, flow, z)}
        for name, plan in plans.items():
            runs[name] = lambda z=z, plan=plan: flow.decode(z, plan, on_failure="return", warn=False).x
        took = seconds_of(runs, turns)
        best = min(plans, key=lambda name: took[name])
        off = (runs[best]() - runs["sequential"]()).abs().max().item()
        was = took["plain"] / min(old[f"cifar flow/{n}/{name}"] for name in plans) if old else None
        about = {"before": was, "seconds": took[best], "deviation": off}
        what = f"CIFAR configuration, plain loop / best ({words[best]})"
        yield row(what, n, gain * (was or 1), took["plain"] / took[best], least=True, **about)


def recorded() -> Iterator[Row]:
    """What other sections counted or raced."""
    docs = {name: doc["rows"] for name, doc in documents(ROOT / "docs/bench").items()}
    means = [r["ratio"] for r in docs.get("guesses", []) if r["block"] in (2, 3, 4)]
    if means:
        yield row("sweeps to an error of 0.05, calibrated / previous", 1, 0.9, statistics.mean(means))
    for found in docs.get("series", []):
        goal = {"mnist": 0.3}.get(found["model"], 0.55)
        about = {"deviation": found["fewest_deviation"]}
        yield row(f"{found['model']}, fewest evaluations in series / selective", 1, goal, found["ratio"], **about)
    for found in docs.get("auto", []):
        about = {"seconds": found["auto_seconds"], "deviation": found["deviation"]}
        what = f"{found['model']}, {found['best_named']} / auto"
        yield row(what, found["batch"], 0.9, found["auto_ratio"], least=True, **about)
    for found in docs.get("tarflow", []):
        if found["method"] == "auto":
            about = {"seconds": found["seconds"], "deviation": found["deviation"]}
            goal = {1: 18.0, 16: 6.0, 64: 5.0}[found["batch"]]
            yield row("mnist, plain loop / auto", found["batch"], goal, found["ratio"], least=True, **about)


@torch.inference_mode()
def rows(repeats: int) -> list[Row]:
    """All of it, in about ten minutes."""
    machine, now, bound = Machine.built(torch.get_num_threads()), Seconds(), Seconds()
    for (shape, batch), names in CALLS.items():
        case = Case(machine, made(shape), batch)
        bound |= {f"{shape}/{batch}/{k}": v for k, v in bounds(case, names).items()}
        now |= {f"{shape}/{batch}/{k}": v for k, v in seconds_of(calls(case, names), repeats).items()}
    old = before.times(repeats)
    return [
        *kernels(now, bound, old),
        *selective(old, repeats),
        *five_sweeps(now["afhq/1/sequential"], bound["afhq/1/whole"], repeats),
        *cifar(old, repeats),
        *recorded(),
    ]
