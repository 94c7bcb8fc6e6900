"""`jacobiflow tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from jacobiflow.cli.options import (
    make_folder,
    note,
    parse,
    parse_labels,
    pick_device,
    refuse_context,
    report,
    table,
)
from jacobiflow.core.plan import Plan
from jacobiflow.core.tune import GUIDE
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.tuning import ROWS, auto_setting, keep, tune

SHOWN = 3  # methods of a block in the table, beside the chosen one and sequential decoding


@dataclass(frozen=True)
class Args:
    """Find the fastest plan of a flow on this machine.

    Times sequential decoding and sweeps of several widths, tolerances and first guesses in each
    block, and keeps what is fastest while samples stay within --max-deviation of sequential decoding.
    The bound is measured on samples and kept with a margin; it is no guarantee for every sample.

    example: jacobiflow tune mnist --batch 16 --max-deviation 0.05 --labels 0-9
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A bundled name, a checkpoint folder or a hub id."""
    batch: int = 16
    """How many samples will be drawn at once."""
    max_deviation: Annotated[float | None, tyro.conf.arg(metavar="BOUND")] = None
    """Largest deviation from sequential decoding. Left out: the model's own."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Classes, in turn: 3, 0-9 or 1,3,5-7. Left out: no label."""
    guidance: float = 0.0
    """Weight of guidance, towards the labels."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Threads to use. Left out: as many as torch takes."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("plan.json")
    """The file to write, for --plan of `jacobiflow sample`."""
    json: bool = False
    """Print JSON instead of a table."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="tune")
    if args.batch < 1 or (args.threads is not None and args.threads < 1):
        raise ValueError("--batch and --threads must be 1 or more")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    flow = load(args.model, device=pick_device(args.device))
    refuse_context(flow, "jf.tune")
    guide = Guidance(weight=args.guidance)
    labels = parse_labels(args.labels, 2 * (args.batch + ROWS), flow.num_classes)  # enough for tune
    if args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder; give the file to write")
    make_folder(args.out.parent)
    plan = tune(
        flow,
        args.batch,
        args.max_deviation,
        labels=labels,
        guidance=guide,
        progress=lambda text: note(f"measuring {text}"),
    )
    plan.save(args.out)
    setting = auto_setting(flow, args.batch, labels is not None, guide)
    stored = keep(plan, setting) if plan.about["setting"] == asdict(setting) else None
    doc = {
        "model": args.model,
        "out": str(args.out),
        "stored": None if stored is None else str(stored),
        "methods": [asdict(method) for method in plan],
        **plan.about,
    }
    written = f"written to {args.out}"
    if stored is not None:
        written += f"; plan auto uses it from now on, from\n  {stored}"
    report(doc, f"{show(plan)}\n\n{written}", as_json=args.json)


def show(plan: Plan) -> str:
    """The table for people: of each block the fastest methods, the chosen one and sequential decoding."""
    rows: list[tuple[str, ...]] = [
        ("block", "width", "tol", "first guess", "seconds", "speed-up", "largest dev.")
    ]
    for i, (chosen, tried) in enumerate(zip(plan, plan.about["tried"], strict=True)):
        base = next(t for t in tried if t["width"] == 1)
        for place, trial in enumerate(tried):
            best = all(trial[name] == value for name, value in asdict(chosen).items())
            if place < SHOWN or best or trial is base:
                rows.append((f"{i + 1} *" if best else f"{i + 1}", *cells(trial, base)))
    m, setting = plan.about["measured"], plan.about["setting"]
    return (
        f"{table(rows)}\n\n"
        f"* the plan, on fresh noise in batches of {setting['batch']}: {m['seconds']:.3f} s, sequential "
        f"{m['sequential_seconds']:.3f} s\n"
        f"  speed-up {m['speedup']:.2f}x (the blocks predicted {m['predicted_speedup']:.2f}x)\n"
        f"  largest deviation {m['deviation']:.2g} over {m['rows']} samples; allowed "
        f"{setting['max_deviation']:g}"
    )


def cells(trial: dict[str, Any], base: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table; a deviation seen on a few samples only is at least so large."""
    off = "inf" if trial["deviation"] is None else f"{trial['deviation']:.2g}"
    at_least = "> " if trial["rows"] < min(GUIDE, base["rows"]) else ""
    width = {1: "sequential", None: "whole"}.get(trial["width"], str(trial["width"]))
    swept = ("", "") if trial is base else (f"{trial['tol']:g}", trial["init"])
    speedup = f"{base['seconds'] / trial['seconds']:.2f}x"
    return (width, *swept, f"{trial['seconds']:.4f}", speedup, at_least + off)
