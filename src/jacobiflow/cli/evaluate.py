"""`jacobiflow evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

import jacobiflow
from jacobiflow.cli.options import parse, pick_device, report, table
from jacobiflow.core.types import Decoded
from jacobiflow.data.ising import Estimate
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow.metrics import ising


@dataclass(frozen=True, kw_only=True)
class Args:
    """Measure how good a model's samples are.

    Each metric says what it takes to be right: `ising`, for flows trained for an Ising model, puts energy,
    magnetisation, effective sample size and the bound of log Z beside exact and Monte-Carlo values.

    example: jacobiflow evaluate ising-16 -n 100000 --json
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A bundled name, a checkpoint folder or a hub id."""
    metrics: tuple[str, ...] = ()
    """Which: ising. Left out: those that the model was made for."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 100_000
    """How many samples."""
    seed: int = 0
    """Sample i depends on (seed, i) only."""
    plan: str = "selective"
    """sequential, uniform, selective or a plan's JSON file."""
    tol: Annotated[float | None, tyro.conf.arg(metavar="TOL")] = None
    """Largest last update of swept blocks. Left out: the model's own."""
    batch: int = 1000
    """Samples at a time."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Found:
    """What a metric measured, for programs and for people."""

    doc: dict[str, Any]
    text: str


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="evaluate")
    if args.n < 2 or args.batch < 1 or args.seed < 0:
        raise ValueError("-n must be 2 or more, --batch 1 or more and --seed 0 or more")
    for name in args.metrics:
        if name not in METRICS:
            raise ValueError(f"--metrics knows {', '.join(METRICS)}, not {name!r}")
    flow = load(args.model, device=pick_device(args.device))
    plan = flow.plan(args.plan, tol=args.tol)  # a wrong plan is found before any work is done
    names = args.metrics or defaults(args, flow)
    found = {name: METRICS[name](args, flow, lambda z: flow.decode(z, plan)) for name in names}
    doc: dict[str, Any] = {
        "model": args.model,
        "metrics": list(names),
        "seed": args.seed,
        "plan": args.plan,
        "tol": args.tol,
        "threads": torch.get_num_threads(),
        "device": str(next(flow.parameters()).device),
        "versions": {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__},
    }
    for one in found.values():
        doc |= one.doc
    report(doc, "\n\n".join(one.text for one in found.values()), as_json=args.json)


def defaults(args: Args, flow: Flow) -> tuple[str, ...]:
    """The metrics that a model was made for."""
    kind = (flow.target or {}).get("kind")
    if kind not in METRICS:
        raise ValueError(
            f"no metric is known for {args.model}: choose with --metrics, of {', '.join(METRICS)}"
        )
    return (str(kind),)


def measure_ising(args: Args, flow: Flow, decode: Callable[[Tensor], Decoded]) -> Found:
    """Physics of the samples."""
    target = ising.target_of(flow)
    with tqdm(total=args.n, unit="sample", dynamic_ncols=True, disable=None) as bar:
        m = ising.evaluate(
            flow, samples=args.n, seed=args.seed, batch=args.batch, decode=decode, progress=bar.update
        )

    def row(name: str, raw: Estimate, again: Estimate | None, known: str) -> tuple[str, str, str, str]:
        return name, show(raw), "" if again is None else show(again), known

    rows = [
        ("", "raw samples", "reweighted", "known"),
        row(
            "energy per site",
            m.energy_per_site,
            m.reweighted_energy_per_site,
            f"{m.exact_energy_per_site:.6f}",
        ),
        row(
            "|m|", m.abs_magnetization, m.reweighted_abs_magnetization, show(m.monte_carlo_abs_magnetization)
        ),
        row("effective sample size", m.effective_sample_size, None, "1"),
        row("log Z (raw: lower bound)", m.log_z_bound, m.reweighted_log_z, f"{m.exact_log_z:.4f}"),
    ]
    lost = f"; {m.not_finite} of them have no finite answer and are left out" if m.not_finite else ""
    text = (
        f"{target.side} x {target.side} Ising model at T = {target.temperature:g}, "
        f"{m.samples:,} samples{lost}\n\n"
        f"{table(rows)}\n\nknown: Kaufman's exact values; for |m| heat bath Monte Carlo"
    )
    return Found({"target": target.to_dict(), **m.to_dict()}, text)


def show(e: Estimate) -> str:
    """A value and its standard error."""
    return f"{e.value:.5g} ± {e.error:.2g}"


METRICS: dict[str, Callable[[Args, Flow, Callable[[Tensor], Decoded]], Found]] = {"ising": measure_ising}
