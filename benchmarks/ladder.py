"""The ladder: what each step of the method brings for one sample, on the CIFAR configuration and on `mnist`.

Every rung adds one thing to the rung above; the plan that `mnist` gets by default comes last. One ladder runs
in C. The other runs in torch alone, where calls bound sequential decoding, as on a GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks.before import tame
from benchmarks.harness import Row, Section
from jacobiflow.core.method import Init
from jacobiflow.flows.calibration import calibrate
from jacobiflow.flows.compare import plain_tarflow
from jacobiflow.kernels.backend import Backend

CIFAR = "the CIFAR configuration"
NOISES = 64  # that first guesses are fitted on, where a model has none
WINDOW = jf.Method(width=32, tol=1e-3)
WHOLE = jf.Method(tol=0.02)
ONCE_SECONDS = 10.0  # a rung that takes longer is not repeated
Rung = Callable[[], tuple[Tensor, int]]  # x, and network evaluations in series


def sections(model: str = "mnist") -> dict[str, Section]:
    """The four ladders; model: a bundled name or a checkpoint folder."""
    return {
        f"ladder-{short}{suffix}": Section(
            f"the ladder of {name} {where}, one sample", partial(rows, model=name, compiled=compiled)
        )
        for short, name in (("mnist", model), ("cifar", CIFAR))
        for suffix, where, compiled in (
            ("", "with the C kernels", "c"),
            ("-torch", "in torch alone", "compile"),
        )
    }


def rungs(flow: jf.TarFlow, z: Tensor, compiled: Backend) -> dict[str, Rung]:
    """By name, from the plain loop on."""
    blocks, labels = len(flow.blocks), torch.zeros(len(z)).long() if flow.num_classes else None

    def plain() -> tuple[Tensor, int]:
        return plain_tarflow(flow, z, labels), blocks * (flow.sequence_shape[0] - 1)

    def ours(plan: jf.Plan, backend: Backend) -> Rung:
        def run() -> tuple[Tensor, int]:
            out = flow.decode(z, plan, labels=labels, backend=backend)
            return out.x, sum(int(b.sweeps.max()) for b in out.stats.blocks)

        return run

    def windows(init: Init) -> jf.Plan:
        methods = (WINDOW, *[WHOLE] * (blocks - 1))
        return jf.Plan(tuple(jf.Method(width=m.width, tol=m.tol, init=init) for m in methods))

    one_by_one, compiler = jf.Plan.sequential(blocks), "torch.compile" if compiled == "compile" else "C"
    found: dict[str, Rung] = {
        "plain loop": plain,
        "+ cached prefix, written in place": ours(one_by_one, "torch"),
        f"+ compiled ({compiler})": ours(one_by_one, compiled),
        "+ sweeps, tol 0.5 (selective)": ours(jf.Plan.selective(blocks, tol=0.5, init="zeros"), compiled),
        "+ sliding window of 32, tol 0.001; sweeps, tol 0.02": ours(windows("zeros"), compiled),
        "+ calibrated guess": ours(windows("calibrated"), compiled),
    }
    if flow.profile and compiled == "c":
        found["auto, the default"] = ours(flow.plan("auto", n=len(z)), compiled)
    return found


def rows(repeats: int, model: str, compiled: Backend) -> list[Row]:
    """Medians of alternating runs, each round one rung later than the one before."""
    flow = tame("cifar", 6) if model == CIFAR else jf.load(model)
    assert isinstance(flow, jf.TarFlow)
    if flow.guesses() is None:
        calibrate(flow, noises=NOISES)
    z = flow.noise(1, seed=0)
    steps = list(rungs(flow, z, compiled).items())
    found = {name: run() for name, run in steps}  # warms up
    exact, seconds = found[steps[1][0]][0], {name: list[float]() for name, _ in steps}
    for turn in range(repeats):
        for i in range(len(steps)):
            name, run = steps[(turn + i) % len(steps)]
            if turn and seconds[name][0] > ONCE_SECONDS:
                continue
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    took = [statistics.median(seconds[name]) for name, _ in steps]
    return [
        {
            "rung": name,
            "seconds": took[i],
            "evaluations_in_series": found[name][1],
            "over_the_rung_above": took[i - 1] / took[i] if i else 1.0,
            "over_the_plain_loop": took[0] / took[i],
            "deviation": float((found[name][0] - exact).abs().max()),
        }
        for i, (name, _) in enumerate(steps)
    ]
