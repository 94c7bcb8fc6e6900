"""`jacobiflow bench`."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from jacobiflow import __version__
from jacobiflow.cli import options as cli
from jacobiflow.core.arguments import as_int
from jacobiflow.core.hardware import processor_name
from jacobiflow.core.pictures import save_strip
from jacobiflow.core.progress import note, steps
from jacobiflow.core.tables import counted, table, terminal_width
from jacobiflow.flows.checks import remedy
from jacobiflow.flows.compare import MOST_RUNS, NOISY, PLAIN, Row, compare, has_plain_loop
from jacobiflow.jobs.sampling import labels_in_turn

FILES = ("bench.json", "bench.png")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Compare plans on this machine: seconds, speed-up, deviation from exact.

    Every plan decodes the same noise at each batch size. Speed-ups are relative to
    the plain loop (sequential decoding as public TarFlow code does it) for a
    TarFlow without guidance, else to our sequential decoding. Runs alternate until
    speed-ups are stable. Writes bench.json and, for images, bench.png into --out.

    example: jacobiflow bench mnist --batch 1 16 --plan uniform selective
    """

    flow: cli.FlowOptions
    batch: Annotated[tuple[int, ...], cli.arg(metavar="N ...")] = (1, 16)  # Batch sizes.
    plan: Annotated[tuple[str, ...], cli.arg(metavar="PLAN ...")] = ()
    """auto, uniform, selective or JSON files. Default: selective and auto; selective with --tol or --init."""
    repeats: cli.Count = MOST_RUNS  # Most runs per plan and batch size.
    seconds: Annotated[float, cli.arg(metavar="SECONDS")] = 120.0
    """Runs are not repeated after so long, but for the three that a speed-up needs."""
    out: cli.Folder = Path("bench")  # Folder to write into.
    force: cli.Force = False
    json: cli.Json = False
    decoding: cli.DecodingOptions
    guidance: cli.GuidanceOptions


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 1 if samples are not finite."""
    args = cli.parse(Args, argv, command="bench")
    names = args.plan or tuple(dict.fromkeys(("selective", args.decoding.default_plan)))
    as_int("--batch", min(args.batch, default=0), 1)
    as_int("--repeats", args.repeats, 1)
    if not args.seconds > 0:
        raise ValueError(f"--seconds must be above 0, not {args.seconds:g}")
    args.decoding.check(names)
    flow = args.flow.load("jacobiflow.flows.compare")
    backend = args.decoding.backend
    cycle = cli.label_cycle(args.flow.labels, flow.num_classes, flow.class_names)
    guidance = args.guidance.for_flow(flow, args.flow.labels, backend)

    def options(plan: str) -> dict[str, Any]:
        return args.decoding.of_plan(plan) | ({"guidance": guidance} if guidance.weight else {})

    plans = list(dict.fromkeys(["sequential", *names]))
    for plan in set(plans) - {"auto"}:  # mistakes are found before any work is done
        flow.plan(plan, **args.decoding.of_plan(plan))
    if has_plain_loop(flow, guidance):
        plans = [PLAIN, *plans]
    cli.make_folder(args.out, FILES, force=args.force)
    z = flow.noise(max(args.batch), args.decoding.seed)
    note(f"timing {counted(len(plans), 'plan')}: this stops repeating after {args.seconds:g} s")
    with steps("timing") as show_step:
        given: dict[str, Any] = {"repeats": args.repeats, "budget": args.seconds, "backend": backend}
        given |= {"options": options, "condition": lambda n: {"labels": labels_in_turn(cycle, range(n))}}
        rows, outs = compare(flow, z, plans, args.batch, progress=show_step, **given)
    (args.out / "bench.png").unlink(missing_ok=True)  # of an earlier run
    machine, threads = processor_name(z.device), torch.get_num_threads()
    setting = f"{machine}, {counted(threads, 'thread')}, torch {torch.__version__}"
    if flow.image_shape is not None:
        title = f"{args.flow.model}: the same noise by every method. {setting}"
        strip = [(caption([r for r in rows if r.plan == name]), outs[name].x) for name in plans]
        save_strip(strip, args.out / "bench.png", title=title)
    doc = asdict(args.flow) | asdict(args.decoding) | asdict(args.guidance) | {"repeats": args.repeats}
    doc |= {"machine": machine, "threads": threads, "device": str(z.device), "rows": [*map(asdict, rows)]}
    doc |= {"versions": {"jacobiflow": __version__, "torch": torch.__version__}}
    fewest, most = min(row.runs for row in rows), max(row.runs for row in rows)
    medians = f"{fewest} to " * (fewest < most) + counted(most, "alternating run")
    files = ", ".join(FILES[: 1 + (flow.image_shape is not None)])
    text = f"{show(rows)}\n\nmedians of {medians} on\n{setting}\nwritten to {args.out}: {files}\n\n"
    text += textwrap.fill(conclusion(rows, plans), terminal_width())
    cli.report(doc, text, as_json=args.json, file=args.out / "bench.json")
    worst = max(rows, key=lambda row: row.nonfinite)
    return cli.exit_status("bench", worst.nonfinite, worst.batch, remedy(guidance, z.dtype))


def caption(rows: Sequence[Row]) -> str:
    """The line below a plan's row of images: its time and speed-up at every batch size, its deviation."""
    each = (f"{1000 * r.seconds:,.0f} ms at batch {r.batch} ({r.gain})" for r in rows)
    return f"{Path(rows[0].plan).name}: {', '.join(each)}, deviation {max(r.largest for r in rows):.2g}"


def conclusion(rows: Sequence[Row], plans: Sequence[str]) -> str:
    """What was gained by the last plan, and how exact it is, in a sentence."""
    own = [row for row in rows if row.plan == plans[-1]]
    if any(not row.stable for row in own):
        return f"The speed-up of {plans[-1]} is too noisy to tell: repeat on a quiet machine."
    base = f"the {PLAIN}" if plans[0] == PLAIN else "sequential decoding"
    gains = ", ".join(f"{row.gain} as fast at batch {row.batch}" for row in own)
    largest = max(row.largest for row in own)
    exact = f"deviate from exact by up to {largest:.2g}" if largest else "are exact"
    return f"Compared with {base}, {plans[-1]} is {gains}; its samples {exact}."


def show(rows: Sequence[Row]) -> str:
    """The table for people."""
    body = [("plan", "batch", "seconds", "speed-up", "sweeps", "deviation", "backend", "status")]
    for r in rows:
        numbers = (str(r.batch), f"{r.seconds:.3f}", r.gain, f"{sum(r.sweeps):.0f}" if r.sweeps else "")
        body.append((Path(r.plan).name, *numbers, f"{r.largest:.2g}", r.backend, r.summary))
    noisy = "" if all(row.stable for row in rows) else f"\n{NOISY}: runs disagree about the speed-up"
    return f"{table(body)}\n\nsweeps: network evaluations in series, all blocks together, mean over samples{noisy}"
