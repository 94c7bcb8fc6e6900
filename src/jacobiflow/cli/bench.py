"""`jacobiflow bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

import jacobiflow
from jacobiflow.cli.options import (
    make_folder,
    note,
    parse,
    parse_labels,
    pick_device,
    refuse_context,
    report,
)
from jacobiflow.cli.sample import SWEPT, check_plans, exit_status, show
from jacobiflow.core.hardware import machine
from jacobiflow.core.records import as_json
from jacobiflow.data.pictures import as_images, save_strip
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.compare import Row, compare
from jacobiflow.flows.nonfinite import remedy


@dataclass(frozen=True)
class Args:
    """Time plans against sequential decoding on this machine.

    Every plan decodes the same noise at each batch size. Runs alternate between plans, the table
    shows their medians, and how far each answer is from exact. Into --out go bench.json and, for images,
    bench.png: one row of samples per plan with its time.

    example: jacobiflow bench mnist --batch 1 16 --plan uniform selective
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A bundled name, a checkpoint folder or a hub id."""
    batch: tuple[int, ...] = (1, 16)
    """Batch sizes, one or several."""
    plan: tuple[str, ...] = ("selective",)
    """uniform, selective, auto or a plan's JSON file; one or several."""
    tol: Annotated[float | None, tyro.conf.arg(metavar="TOL")] = None
    """Largest last update of swept blocks. Left out: the model's own."""
    init: Annotated[Literal["zeros", "noise", "previous"] | None, tyro.conf.arg(metavar="INIT")] = None
    """First guess of sweeps: zeros, noise or previous."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Classes, in turn: 3, 0-9 or 1,3,5-7. Left out: no label."""
    seed: int = 0
    """Sample i depends on (seed, i) only."""
    repeats: int = 5
    """Runs of each plan; the table shows their median."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Threads to use. Left out: as many as torch takes."""
    backend: Annotated[Literal["torch", "c", "compile"] | None, tyro.conf.arg(metavar="BACKEND")] = None
    """What evaluates the network: torch, c or compile. Left out: the fastest that supports the model."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("bench")
    """Folder for what is written."""
    json: bool = False
    """Print JSON instead of a table."""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 1 if samples are not finite."""
    args = parse(Args, argv, command="bench")
    check(args)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    flow = load(args.model, device=pick_device(args.device))
    refuse_context(flow, "jacobiflow.flows.compare")
    largest = max(args.batch)
    labels = parse_labels(args.labels, largest, flow.num_classes)

    def options(plan: str) -> dict[str, Any]:
        return {"tol": args.tol, "init": args.init} if plan in SWEPT else {}

    plans = list(dict.fromkeys(["sequential", *args.plan]))
    for plan in set(plans) - {"auto"}:  # a wrong plan is found before any work is done
        flow.plan(plan, **options(plan))
    with torch.no_grad():
        flow.bound_blocks(1, backend=args.backend)  # raises if the flow is not for this backend
    make_folder(args.out)
    z = flow.noise(largest, args.seed)
    rows, outs = compare(
        flow,
        z,
        plans,
        args.batch,
        repeats=args.repeats,
        backend=args.backend,
        options=options,
        condition=lambda n: {} if labels is None else {"labels": labels[:n]},
        progress=lambda text: note(f"timing {text}"),
    )
    setting = f"{machine(z.device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    files = ["bench.json"]
    if as_images(z.new_empty(1, *flow.data_shape)) is not None:
        last = {row.plan: row for row in rows if row.batch == largest}
        strips = [(_caption(last[plan]), outs[plan].x) for plan in plans]
        save_strip(strips, args.out / "bench.png", title=f"{args.model}, batch {largest}, {setting}")
        files.append("bench.png")
    doc = {
        "model": args.model,
        "seed": args.seed,
        "labels": args.labels,
        "tol": args.tol,
        "init": args.init,
        "repeats": args.repeats,
        "machine": machine(z.device),
        "threads": torch.get_num_threads(),
        "device": str(z.device),
        "versions": {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__},
        "rows": [as_json(asdict(r)) for r in rows],
    }
    text = json.dumps(doc, indent=2, allow_nan=False) + "\n"
    (args.out / "bench.json").write_text(text, encoding="utf-8")
    text = f"{show(rows)}\n\nmedians of {args.repeats} alternating runs on {setting}"
    report(doc, f"{text}\nwritten to {args.out}: {', '.join(files)}", as_json=args.json)
    worst = max(rows, key=lambda r: r.nonfinite)
    return exit_status("bench", worst.nonfinite, worst.batch, remedy(0.0, z.dtype))


def _caption(row: Row) -> str:
    return f"{Path(row.plan).name}: {1000 * row.seconds:,.0f} ms, {row.speedup:.2g}x"


def check(args: Args) -> None:
    """What can be wrong whatever the model is."""
    if not args.batch or min(args.batch) < 1 or args.repeats < 1 or args.seed < 0:
        raise ValueError("--batch and --repeats must be 1 or more, --seed 0 or more")
    if args.threads is not None and args.threads < 1:
        raise ValueError(f"--threads must be 1 or more, not {args.threads}")
    check_plans(args.plan, args.tol, args.init)
