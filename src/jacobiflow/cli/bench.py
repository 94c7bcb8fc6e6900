"""`jacobiflow bench`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from jacobiflow import __version__
from jacobiflow.cli import options as cli
from jacobiflow.core.hardware import processor_name
from jacobiflow.core.pictures import as_images, save_strip
from jacobiflow.core.tables import table
from jacobiflow.flows.compare import Row, compare
from jacobiflow.flows.nonfinite import remedy

HEAD = ("plan", "batch", "seconds", "speed-up", "sweeps per block", "largest dev.", "mean dev.", "backend")


@dataclass(frozen=True, kw_only=True)
class Args:
    """Time plans against sequential decoding on this machine.

    Every plan decodes the same noise at each batch size. Runs alternate between
    plans. The table shows their median time, the sweeps per block and the
    deviation from exact. Writes bench.json and, for images, bench.png into --out:
    one row of samples per plan with its time.

    example: jacobiflow bench mnist --batch 1 16 --plan uniform selective
    """

    flow: cli.FlowOptions
    batch: Annotated[tuple[int, ...], tyro.conf.arg(metavar="N ...")] = (1, 16)
    """Batch sizes."""
    plan: Annotated[tuple[str, ...], cli.option("PLAN ...")] = ()
    """uniform, selective, auto or a plan's JSON file; one or several. Default:
    selective and auto; selective with --tol or --init."""
    repeats: Annotated[int, tyro.conf.arg(metavar="N")] = 5
    """Runs per plan and batch size."""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("bench")
    """Folder to write into."""
    json: cli.Json = False
    decoding: cli.DecodingOptions
    guidance: cli.GuidanceOptions


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 1 if samples are not finite."""
    args = cli.parse(Args, argv, command="bench")
    names = args.plan or tuple(dict.fromkeys(("selective", args.decoding.default_plan)))
    cli.check_range("--batch", min(args.batch, default=0))
    cli.check_range("--repeats", args.repeats)
    args.decoding.check(names)
    flow = args.flow.load("jacobiflow.flows.compare")
    largest, backend = max(args.batch), args.decoding.backend
    labels = cli.parse_labels(args.flow.labels, largest, flow.num_classes)
    guidance = args.guidance.for_flow(flow, args.flow.labels, backend)

    def options(plan: str) -> dict[str, Any]:
        return args.decoding.of_plan(plan) | ({"guidance": guidance} if guidance.weight else {})

    plans = list(dict.fromkeys(["sequential", *names]))
    for plan in set(plans) - {"auto"}:  # mistakes are found before any work is done
        flow.plan(plan, **args.decoding.of_plan(plan))
    cli.make_folder(args.out)
    z = flow.noise(largest, args.decoding.seed)
    with cli.progress("timing") as show_step:
        rows, outs = compare(
            flow,
            z,
            plans,
            args.batch,
            repeats=args.repeats,
            backend=backend,
            options=options,
            condition=lambda n: {} if labels is None else {"labels": labels[:n]},
            progress=show_step,
        )
    setting = f"{processor_name(z.device)}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    files = ["bench.json"]
    if as_images(z.new_empty(1, *flow.data_shape)) is not None:
        last = [row for row in rows if row.batch == largest]
        title = f"{args.flow.model}, batch {largest}, {setting}"
        save_strip([(caption(row), outs[row.plan].x) for row in last], args.out / "bench.png", title=title)
        files.append("bench.png")
    doc = (
        asdict(args.flow)
        | asdict(args.decoding)
        | asdict(args.guidance)
        | {
            "repeats": args.repeats,
            "machine": processor_name(z.device),
            "threads": torch.get_num_threads(),
            "device": str(z.device),
            "versions": {"jacobiflow": __version__, "torch": torch.__version__},
            "rows": [asdict(row) for row in rows],
        }
    )
    text = f"{show(rows)}\n\nmedians of {args.repeats} alternating runs on {setting}"
    text += f"\nwritten to {args.out}: {', '.join(files)}"
    cli.report(doc, text, as_json=args.json, file=args.out / "bench.json")
    worst = max(rows, key=lambda row: row.nonfinite)
    return cli.exit_status("bench", worst.nonfinite, worst.batch, remedy(guidance, z.dtype))


def caption(row: Row) -> str:
    """The line below a plan's row of images."""
    return f"{Path(row.plan).name}: {1000 * row.seconds:,.0f} ms, {row.speedup:.2g}x"


def show(rows: Sequence[Row]) -> str:
    """The table for people."""
    body = [
        (
            row.plan,
            str(row.batch),
            f"{row.seconds:.3f}",
            f"{row.speedup:.2f}x",
            " ".join(f"{s:.0f}" if s == round(s) else f"{s:.1f}" for s in row.sweeps),
            f"{row.largest:.2g}",
            f"{row.mean:.2g}",
            row.backend,
            row.summary,
        )
        for row in rows
    ]
    return table([(*HEAD, "status"), *body])
