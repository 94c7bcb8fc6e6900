"""MAF on binary MNIST (Figure A3) and on the Ising model (Table A5)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.method import Plan
from jacobiflow.flows.compare import deviation
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.plots import save_grids
from jacobiflow_lab.analysis.runtime import Clock
from jacobiflow_lab.lattice import evaluation as ising
from jacobiflow_lab.lattice.lattice_flow import LatticeFlow
from jacobiflow_lab.paper.sampling import TAU
from jacobiflow_lab.paper.schema import Doc, Item, Result
from jacobiflow_lab.paper.session import Task

IMAGES = 100  # the paper's
FULL = "sequential, full passes"
PAPER = f"sweeps, tau {TAU:g}, from zeros"  # its algorithm
Decoder = Callable[[Tensor], Tensor]


def full_passes(flow: Flow, z: Tensor) -> Tensor:
    """Every block inverted by one uncached pass per position, as other libraries do it."""
    seq = flow.to_prior(z)
    with torch.no_grad():
        for block in flow.bound_blocks(len(z), backend="torch"):
            x = torch.zeros_like(seq)
            for _ in range(block.length):
                x, _ = block.sweep(x, seq)
            seq = x
        return flow.from_sequence(seq)


def paper_plan(flow: Flow) -> Plan:
    """The paper's sweeps: tau bounds absolute changes."""
    return flow.selective(TAU, "zeros").resolved("absolute")


def decoders(flow: Flow) -> dict[str, Decoder]:
    """The methods of both tables. "selective" sweeps all blocks of a MAF, as in the paper."""
    return {
        FULL: lambda z: full_passes(flow, z),
        "sequential, cached": lambda z: flow.decode(z, "sequential").x,
        "sweeps": lambda z: flow.decode(z, "selective").x,
        PAPER: lambda z: flow.decode(z, paper_plan(flow)).x,
    }


def clock_batches(run: Decoder, z: Tensor, batch: int) -> tuple[float, Tensor]:
    """Seconds and samples of noise z in batches; one row beforehand pays for what is made at first use."""
    run(z[:1])
    clock = Clock(z.device)
    x = torch.cat([run(part) for part in torch.split(z, batch)])
    return clock.seconds(), x


def row(name: str, seconds: float, x: Tensor, exact: Tensor, slowest: float) -> dict[str, Any]:
    """One method beside sequential decoding of the same noise. slowest: seconds of full passes."""
    nonfinite = int((~x.isfinite().all(1)).sum())
    times = {"method": name, "seconds": seconds, "speedup": slowest / seconds}
    return times | deviation(x, exact) | {"not_finite": nonfinite}


def run_mnist(task: Task) -> Result:
    """100 images of the same noise by every method."""
    flow, z = task.flow, task.flow.noise(IMAGES, task.seed)
    assert flow.image_shape is not None
    found = {name: clock_batches(run, z, IMAGES) for name, run in decoders(flow).items()}
    slowest, exact = found[FULL]
    rows = [
        row(name, seconds, x, exact, slowest) | {"pixels_alike": ((x > 0) == (exact > 0)).double().mean().item()}
        for name, (seconds, x) in found.items()
    ]
    sweeps = [b.sweeps.double().mean().item() for b in flow.decode(z, "selective").stats.blocks]
    # Training saw bit + u - 1 with u uniform in [0, 1): the bit is 1 where that is positive.
    bits = {name: (x > 0).byte().reshape(-1, *flow.image_shape)[:60] * 255 for name, (_, x) in found.items()}
    faster = next(r["speedup"] for r in rows if r["method"] == PAPER)
    shown = {FULL: bits[FULL], f"{PAPER}, {faster:.0f}x": bits[PAPER]}
    caption = "Binary MNIST: the same noise by both. MAFs of this kind draw poorly."
    picture = task.picture("samples", caption, lambda path: save_grids(path, shown, columns=20, across=1))
    data = {"rows": rows, "sweeps": sweeps, "tol": flow.default_tol, "tau": TAU}
    return Result(data=data, counts={"images": IMAGES, "runs": 1}, pictures=(picture,))


def run_ising(task: Task) -> Result:
    """Observables and seconds of every method; at CPU scale timed on fewer samples and extrapolated."""
    flow, scale = task.flow, task.scale
    n = max(task.session.samples or 0, scale.ising, 2)
    batch = min(1000, n)
    share = 1 if scale.name == "paper" else 10
    check = flow.noise(min(batch, 200), task.seed)
    slow = full_passes(flow, check)
    rows: list[dict[str, Any]] = []
    for name, run in decoders(flow).items():
        count = max(2, n // (50 * share if name == FULL else share))
        part, _ = clock_batches(run, flow.noise(count, task.seed), batch)
        seconds = part * n / count
        slowest = rows[0]["seconds"] if rows else seconds
        rows.append(row(name, seconds, run(check), slow, slowest) | {"timed_on": count})
    for i, plan in enumerate((flow.plan("sequential"), flow.plan("selective"), paper_plan(flow)), start=1):
        count = n if i == 2 else rows[i]["timed_on"]
        decode = partial(flow.decode, plan=plan)
        observed = ising.evaluate(flow, samples=count, seed=task.seed, batch=batch, decode=decode)
        rows[i]["observed"] = observed.to_dict()
    exact, ours = (rows[i]["observed"]["energy_per_site"] for i in (1, 3))
    about = {
        "energy_difference": abs(exact - ours),
        "tol": flow.default_tol,
        "tau": TAU,
        "known": rows[2]["observed"],
        "flow": describe(flow),
    }
    return Result(data={"rows": rows} | about, counts={"samples": n, "compared": len(check)})


def describe(flow: Flow) -> Doc:
    """What kind of MAF it is."""
    assert isinstance(flow, LatticeFlow)
    blocks = flow.config.blocks
    also = ", a linear layer" if flow.config.linear else ""
    local = f", sites within {flow.config.reach}" if flow.config.reach else ""
    return {
        "shape": f"{blocks} blocks, {flow.config.transform}{also}{local}",
        "parameters": sum(p.numel() for p in flow.parameters()),
    }


MNIST = Item(name="maf-mnist", models=lambda scale: ("mnist-maf",), run=run_mnist, minutes=lambda scale, model: 0.7)
ISING = Item(
    name="maf-ising", models=lambda scale: ("ising-16", "ising-maf"), run=run_ising, minutes=lambda scale, model: 3.0
)
