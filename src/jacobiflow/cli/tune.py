"""`jacobiflow tune`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from jacobiflow.cli import options as cli
from jacobiflow.core.arguments import as_int
from jacobiflow.core.method import Plan
from jacobiflow.core.progress import steps
from jacobiflow.core.tables import table
from jacobiflow.flows.compare import NOISY
from jacobiflow.flows.plans import keep
from jacobiflow.flows.tune import tune


@dataclass(frozen=True, kw_only=True)
class Args:
    """Find the fastest plan of a flow on this machine.

    Measures how fast sweeps converge in each block, unless that is known already,
    and times the most promising plans. A plan takes part if its samples stay
    within --max-deviation of sequential decoding. The bound is measured on
    samples and kept with a margin; it is no guarantee for every sample. What was
    measured about the model is kept, so that plan auto uses it from now on.

    example: jacobiflow tune mnist --batch 16 --max-deviation 0.05 --labels 0-9
    """

    flow: cli.FlowOptions
    batch: cli.Count = 16  # Samples per batch that the plan is for.
    max_deviation: cli.Bound = None  # Largest deviation from exact. Default: the model's own.
    save: bool = False  # Keep what was measured in the checkpoint's folder instead of the cache folder.
    out: Annotated[Path, cli.arg(metavar="FILE")] = Path("plan.json")  # The plan file, for --plan of other commands.
    force: cli.Force = False
    json: cli.Json = False
    guidance: cli.GuidanceOptions


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = cli.parse(Args, argv, command="tune")
    as_int("--batch", args.batch, 1)
    folder = Path(args.flow.model)
    if args.save and not folder.is_dir():
        raise ValueError(f"--save: {args.flow.model} is not a checkpoint folder, leave it out")
    flow = args.flow.load("jf.tune")
    guidance = args.guidance.for_flow(flow, args.flow.labels)
    labels = cli.label_cycle(args.flow.labels, flow.num_classes, flow.class_names) or None
    if args.out.is_dir():
        raise ValueError(f"--out {args.out} is a folder: give the file to write")
    cli.make_folder(args.out.parent, [args.out.name], force=args.force)
    with steps("measuring") as show_step:
        plan = tune(flow, args.batch, args.max_deviation, labels=labels, guidance=guidance, progress=show_step)
    plan.save(args.out)
    stored = folder if args.save else keep(flow)
    for measured in (flow.profile, flow.calibration) if args.save else ():
        if measured is not None:
            measured.save(folder)
    doc = plan.about | {"model": args.flow.model, "out": str(args.out)}
    doc |= {"stored": stored and str(stored), "methods": [asdict(method) for method in plan]}
    kept = "" if stored is None else f"; plan auto uses what was measured, from\n  {stored}"
    cli.report(doc, f"{show(plan)}\n\nwritten to {args.out}{kept}", as_json=args.json)


def show(plan: Plan) -> str:
    """The table for people: every plan that was tried, the fastest first."""
    tried, chosen = plan.about["tried"], [asdict(method) for method in plan]
    rows: list[tuple[str, ...]] = [("plan", "seconds", "speed-up", "deviation")]
    for trial in sorted(tried, key=lambda t: (t["seconds"] is None, t["seconds"] or t["predicted"])):
        runs = ((name, len(list(run))) for name, run in groupby(map(short_name, trial["methods"])))
        name = " ".join(f"{count}*{name}" if count > 1 else name for name, count in runs)
        seconds = gain = ""
        if trial["seconds"] is not None:
            seconds = f"{trial['seconds']:.4f}"
            gain = f"{tried[0]['seconds'] / trial['seconds']:.2f}x" if trial["stable"] else NOISY
        deviation = "inf" if trial["deviation"] is None else f"{trial['deviation']:.2g}"
        rows.append((name + " *" * (trial["methods"] == chosen), seconds, gain, deviation))
    measured, setting = plan.about["measured"], plan.about["setting"]
    gain = f"speed-up {measured['speedup']:.2f}x" if measured["stable"] else "speed-up too noisy to tell"
    return (
        f"{table(rows)}\n\n"
        "per block, next to the noise first: 1 is sequential, else width/tolerance;\n"
        "T is the whole sequence, p and z begin at the block's input and at zeros;\n"
        "m is mixed precision, 3*x is three blocks of x. Plans without seconds deviate\n"
        "too much or are slow.\n\n"
        f"* on fresh noise in batches of {setting['batch']}: {measured['seconds']:.4f} s, sequential "
        f"{measured['sequential_seconds']:.4f} s, {gain}\n"
        f"  largest deviation {measured['deviation']:.2g} over {measured['rows']} samples; "
        f"{setting['max_deviation']:g} is allowed"
    )


def short_name(method: dict[str, Any]) -> str:
    """A method in a few letters, such as 16/0.001z."""
    if method["width"] == 1:
        return "1"
    guess = {"previous": "p", "zeros": "z", "noise": "n"}.get(method["init"], "")
    mixed = "m" if method.get("precision") == "mixed" else ""
    return f"{method['width'] or 'T'}/{method['tol']:g}{guess}{mixed}"
