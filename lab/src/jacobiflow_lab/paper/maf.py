"""MAF on binary MNIST (Figure A3) and on the Ising model (Table A5)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.maf import MAF
from jacobiflow_lab.metrics import ising
from jacobiflow_lab.paper import drawing, paper_figures
from jacobiflow_lab.paper.item import (
    Cell,
    Doc,
    Docs,
    Figure,
    Item,
    Picture,
    Result,
    Table,
    missing_rows,
    present,
)
from jacobiflow_lab.paper.workshop import TAU, Context

IMAGES = 100  # the paper's
FULL = "sequential, full passes"
PAPER = f"sweeps, tau {TAU:g}, from zeros"  # its algorithm
Decoder = Callable[[Tensor], Tensor]


def full_passes(flow: Flow, z: Tensor) -> Tensor:
    """Every block inverted by as many passes as it has positions, none of them cached: what libraries do."""
    seq = flow.to_prior(z)
    with torch.no_grad():
        for block in flow.bound_blocks(len(z), backend="torch"):
            x = torch.zeros_like(seq)
            for _ in range(block.length):
                x, _ = block.sweep(x, seq)
            seq = x
        return flow.from_sequence(seq)


def decoders(flow: Flow) -> dict[str, Decoder]:
    """The methods of both tables; "selective" is the family's: MAFs sweep all blocks, as in the paper."""
    return {
        FULL: lambda z: full_passes(flow, z),
        "sequential, cached": lambda z: flow.decode(z, "sequential").x,
        "sweeps": lambda z: flow.decode(z, "selective").x,
        PAPER: lambda z: flow.decode(z, paper_plan(flow)).x,
    }


def paper_plan(flow: Flow) -> Plan:
    """The paper's sweeps: tau bounds absolute changes."""
    return flow.selective(TAU, "zeros").in_unit("absolute")


def clock(run: Decoder, z: Tensor, batch: int) -> tuple[float, Tensor]:
    """Seconds and samples of noise z, `batch` at a time; one row beforehand pays for what is made once."""
    run(z[:1])
    began = time.perf_counter()
    x = torch.cat([run(part) for part in torch.split(z, batch)])
    if z.device.type == "cuda":
        torch.cuda.synchronize(z.device)
    return time.perf_counter() - began, x


def row(name: str, seconds: float, x: Tensor, exact: Tensor, first: float) -> dict[str, Any]:
    """One method beside sequential decoding of the same noise."""
    off = (x - exact).abs()
    off = off[off.isfinite()]
    return {
        "method": name,
        "seconds": seconds,
        "speedup": first / seconds,
        "largest": float(off.max()),
        "mean": float(off.mean()),
        "not_finite": int((~x.isfinite().all(1)).sum()),
    }


def run_mnist(context: Context) -> Result:
    """100 images of the same noise by every method."""
    flow, z = context.flow, context.flow.noise(IMAGES, context.seed)
    found = {name: clock(run, z, IMAGES) for name, run in decoders(flow).items()}
    first, exact = found[FULL]
    rows = [
        row(name, seconds, x, exact, first)
        | {"pixels_alike": ((x > 0) == (exact > 0)).double().mean().item()}
        for name, (seconds, x) in found.items()
    ]
    sweeps = [b.sweeps.double().mean().item() for b in flow.decode(z, "selective").stats.blocks]
    path = context.picture("samples")
    side = context.workshop.shape(context.model)[1]
    # Training saw bit + u - 1 with u uniform in [0, 1): the bit is 1 where that is positive.
    shown = {
        name: ((found[name][1] > 0).byte() * 255).reshape(-1, 1, side, side)[:60] for name in (FULL, PAPER)
    }
    titles = {
        f"{name}, {r['speedup']:.0f}x" if name != FULL else name: shown[name]
        for r in rows
        if (name := r["method"]) in shown
    }
    drawing.grids(path, titles, columns=20, across=1)
    return Result(
        data={"rows": rows, "sweeps": sweeps, "tol": flow.default_tol, "tau": TAU},
        counts={"images": IMAGES, "runs": 1},
        seeds={"noise": context.seed},
        pictures=(
            Picture(path.name, "Binary MNIST: the same noise by both. MAFs of this kind draw poorly."),
        ),
    )


def run_ising(context: Context) -> Result:
    """Observables and seconds of every method, at CPU scale timed on fewer samples, in proportion."""
    flow, scale = context.flow, context.scale
    wanted = max(context.workshop.samples or 0, scale.ising)
    batch, n = min(1000, wanted), max(wanted, 2)
    share = 1 if scale.name == "paper" else 10
    timed_on = {FULL: max(2, n // (50 * share))}
    rows: list[dict[str, Any]] = []
    check = flow.noise(min(batch, 200), context.seed)
    exact = full_passes(flow, check)
    for name, run in decoders(flow).items():
        count = timed_on.get(name, max(2, n // share))
        seconds, _ = clock(run, flow.noise(count, context.seed), batch)
        one = row(
            name, seconds * n / count, run(check), exact, rows[0]["seconds"] if rows else seconds * n / count
        )
        rows.append(one | {"timed_on": count})
    plans = ((1, flow.plan("sequential")), (2, flow.plan("selective")), (3, paper_plan(flow)))
    for place, plan in plans:
        count = n if place == 2 else rows[place]["timed_on"]
        decode = partial(flow.decode, plan=plan)
        found = ising.evaluate(flow, samples=count, seed=context.seed, batch=batch, decode=decode)
        rows[place] |= {"observed": found.to_dict()}
    return Result(
        data={
            "rows": rows,
            "tol": flow.default_tol,
            "tau": TAU,
            "known": rows[2]["observed"],
            "flow": shape(flow),
        },
        counts={"samples": n, "compared": len(check)},
        seeds={"noise": context.seed},
    )


def shape(flow: Flow) -> Doc:
    """What kind of MAF it is."""
    assert isinstance(flow, MAF)
    blocks = flow.config.blocks
    also = ", a linear layer" if flow.config.linear else ""
    local = f", sites within {flow.config.reach}" if flow.config.reach else ""
    return {
        "shape": f"{blocks} blocks, {flow.config.transform}{also}{local}",
        "parameters": sum(p.numel() for p in flow.parameters()),
    }


def mnist_tables(docs: Docs) -> list[Table]:
    """Seconds for 100 images."""
    head = ("model", "method", "seconds", "speed-up", "pixels alike", "largest dev.", "not finite")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, found in enumerate(docs[model]["data"]["rows"]):
            at = f"rows/{i}"
            rows.append(
                (
                    model if i == 0 else "",
                    found["method"],
                    Figure(model, f"{at}/seconds"),
                    (Figure(model, f"{at}/speedup", "{:.1f}"), "x"),
                    Figure(model, f"{at}/pixels_alike", "{:.2%}"),
                    Figure(model, f"{at}/largest", "{:.2g}"),
                    Figure(model, f"{at}/not_finite", "{}"),
                )
            )
    note = (
        "100 images of the same noise, once. Full passes are what nflows does: one over all positions for "
        "each position; the cache of hidden units is ours. Sweeps stop at 1e-4 unless tau is given. Pixels: "
        "black or white as by full passes."
    )
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


def ising_tables(docs: Docs) -> list[Table]:
    """Seconds and observables."""
    head = ("model", "method", "seconds", "speed-up", "energy per site", "|m|", "largest dev.", "timed on")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, found in enumerate(docs[model]["data"]["rows"]):
            at = f"rows/{i}"
            seen: list[Cell] = ["", ""]
            if "observed" in found:
                seen = [
                    (
                        Figure(model, f"{at}/observed/{key}", "{:.4f}"),
                        " ± ",
                        Figure(model, f"{at}/observed/{key}_error", "{:.4f}"),
                    )
                    for key in ("energy_per_site", "abs_magnetization")
                ]
            rows.append(
                (
                    model if i == 0 else "",
                    found["method"],
                    Figure(model, f"{at}/seconds"),
                    (Figure(model, f"{at}/speedup", "{:.1f}"), "x"),
                    *seen,
                    Figure(model, f"{at}/largest", "{:.2g}"),
                    Figure(model, f"{at}/timed_on", "{:,}"),
                )
            )
        known: list[Cell] = [
            Figure(model, "known/exact_energy_per_site", "{:.4f}"),
            Figure(model, "known/monte_carlo_abs_magnetization", "{:.4f}"),
        ]
        rows.append(("", "exact, Monte Carlo", "", "", *known, "", ""))
    note = (
        "Seconds are for all samples, in proportion to those that were timed; observables of sweeps are of "
        "all samples, the others of those that were timed. They are of spins drawn from the fields that the "
        "flow samples. Full passes: one a site, 256 a block, as nflows does. ising-16 decodes in classes of "
        "sites that do not see each other, so that a library that knows of them would need 16."
    )
    first = Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)
    return [first, flows_table(docs)]


def flows_table(docs: Docs) -> Table:
    """How good the flows are."""
    head = (
        "model",
        "kind",
        "parameters",
        "bound of log Z",
        "exact",
        "effective samples",
        "energy, reweighted",
    )
    rows: list[Sequence[Cell]] = [
        (
            model,
            Figure(model, "flow/shape"),
            Figure(model, "flow/parameters", "{:,}"),
            Figure(model, "known/log_z_bound", "{:.2f}"),
            Figure(model, "known/exact_log_z", "{:.2f}"),
            Figure(model, "known/effective_sample_size", "{:.2%}"),
            (
                Figure(model, "known/reweighted_energy_per_site", "{:.4f}"),
                " ± ",
                Figure(model, "known/reweighted_energy_per_site_error", "{:.4f}"),
            ),
        )
        for model in present(docs)
    ]
    note = (
        "The paper's kind of flow, eight affine layers trained by reverse KL, is ising-maf; it cannot hold "
        "this distribution. Samples of both are biased as they come; weighed by p / q, those of ising-16 "
        "are not."
    )
    return Table(title="Ours: the flows themselves", head=head, rows=rows, note=note)


MNIST = Item(
    name="maf-mnist",
    title="MAF on binary MNIST",
    shows="Figure A3",
    models=lambda scale: ("mnist-maf",),
    run=run_mnist,
    tables=mnist_tables,
    theirs=(paper_figures.maf_mnist(),),
    words="Two strips of digits of low quality that look alike, 18.4 times faster below than above.",
    minutes=lambda scale, model: 0.7,
)
ISING = Item(
    name="maf-ising",
    title="MAF on the Ising model",
    shows="Table A5",
    models=lambda scale: ("ising-16", "ising-maf"),
    run=run_ising,
    tables=ising_tables,
    theirs=(paper_figures.ising(),),
    minutes=lambda scale, model: 3.0,
)
