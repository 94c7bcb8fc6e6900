"""`jacobiflow sample`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import tyro
from torch import Tensor

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
from jacobiflow.core.hardware import memory
from jacobiflow.core.records import as_json
from jacobiflow.core.types import Decoded
from jacobiflow.data.pictures import as_images, save_grid
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.compare import Row, compare
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.nonfinite import describe, nonfinite_rows, remedy

SWEPT = ("uniform", "selective")  # the plans that take --tol and --init
NAMED = ("sequential", *SWEPT, "auto")
LARGE = 100_000  # samples that are a job even if nobody says so


@dataclass(frozen=True)
class Args:
    """Draw samples from a flow.

    Decodes the same noise with every --plan and says how long each took, how many sweeps its blocks
    needed and how far it is from exact sequential decoding. Into --out go a grid of each plan, the
    samples (samples.npz) and the figures (report.json). `jacobiflow analyze` shows how sweeps converge.

    With --format, or 100,000 samples and more, it is a job: samples go into shards, and the same
    command goes on where it was, whatever stopped it.

    example: jacobiflow sample mnist -n 64 --labels 0-9 --plan selective --out out
             jacobiflow sample mnist -n 1000000 --format npz --out million
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A bundled name, a checkpoint folder or a hub id."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 16
    """How many samples."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Classes, in turn: 3, 0-9 or 1,3,5-7. Left out: no label."""
    plan: tuple[str, ...] = ("selective",)
    """sequential, uniform, selective, auto or a plan's JSON file; one or several."""
    tol: Annotated[float | None, tyro.conf.arg(metavar="TOL")] = None
    """Largest last update of swept blocks. Left out: the model's own."""
    init: Annotated[Literal["zeros", "noise", "previous"] | None, tyro.conf.arg(metavar="INIT")] = None
    """First guess of sweeps: zeros, noise or previous."""
    guidance: float = 0.0
    """Weight of guidance, towards the labels."""
    guide: Literal["a", "b", "ab"] = "ab"
    """What guidance acts on: log-scale, shift or both."""
    annealed: bool = False
    """Let guidance grow along the sequence."""
    attn_temp: float = 1.0
    """Attention temperature of the twin that guidance leads away from."""
    denoise: bool = False
    """Remove the noise of training from the pictures, by one gradient step."""
    seed: int = 0
    """Sample i depends on (seed, i) only."""
    time_at: tuple[int, ...] = ()
    """Batch sizes for the table. Left out: all samples at once."""
    repeats: int = 1
    """Runs of each plan; the table shows their median."""
    backend: Annotated[Literal["torch", "c", "compile"] | None, tyro.conf.arg(metavar="BACKEND")] = None
    """What evaluates the network: torch, c or compile. Left out: the fastest that supports the model."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("out")
    """Folder for what is written."""
    json: bool = False
    """Print JSON instead of a table."""
    format: Annotated[Literal["npz", "safetensors", "png"] | None, tyro.conf.arg(metavar="FORMAT")] = None
    """Job: what shards are, npz, safetensors or png."""
    batch: Annotated[Literal["auto"] | int, tyro.conf.arg(metavar="BATCH")] = "auto"
    """Job: samples decoded at a time; auto is as memory allows."""
    shard: Annotated[int | None, tyro.conf.arg(metavar="SHARD")] = None
    """Job: samples a shard. Left out: about 1,000, and at most 64 MB."""
    threads: Annotated[int | None, tyro.conf.arg(metavar="THREADS")] = None
    """Job: threads of each process. Left out: 1; use more processes instead."""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 1 if samples are not finite."""
    args = parse(Args, argv, command="sample")
    check(args)
    if is_job(args):
        from jacobiflow.cli import job  # locks need a Unix

        return job.main(args)
    flow = load(args.model, device=pick_device(args.device))
    guide = Guidance(weight=args.guidance, annealed=args.annealed, what=args.guide, attn_temp=args.attn_temp)
    check_model(args, flow)
    check_memory(args, flow)
    labels = parse_labels(args.labels, args.n, flow.num_classes)
    with torch.no_grad():
        flow.bound_blocks(1, guidance=guide, backend=args.backend)  # raises if this flow does not take them
    if guide.weight and labels is None and guide.attn_temp == 1:
        note("--guidance changes nothing without --labels or another --attn-temp")

    def options(plan: str) -> dict[str, Any]:
        found: dict[str, Any] = {"guidance": guide} if guide.weight else {}
        return found | ({"tol": args.tol, "init": args.init} if plan in SWEPT else {})

    def condition(batch: int) -> dict[str, Any]:
        return {} if labels is None else {"labels": labels[:batch]}

    for plan in set(args.plan) - {"auto"}:  # a wrong plan is found before any work is done
        flow.plan(plan, **{k: v for k, v in options(plan).items() if k != "guidance"})
    make_folder(args.out)
    z = flow.noise(args.n, args.seed)
    rows, outs = compare(
        flow,
        z,
        args.plan,
        [*args.time_at, args.n],
        repeats=args.repeats,
        backend=args.backend,
        options=options,
        condition=condition,
        progress=lambda text: note(f"decoding {text}"),
    )
    files, lost = write(args, flow, labels, {p: outs[p] for p in args.plan})
    doc = {
        "model": args.model,
        "n": args.n,
        "seed": args.seed,
        "labels": args.labels,
        "threads": torch.get_num_threads(),
        "device": str(z.device),
        "repeats": args.repeats,
        "rows": [as_json(asdict(r)) for r in rows],
        "nonfinite": lost,
        "files": files,
    }
    text = json.dumps(doc, indent=2, allow_nan=False) + "\n"
    (args.out / "report.json").write_text(text, encoding="utf-8")
    names = ", ".join([*files, "report.json"])
    report(doc, f"{show(rows)}\n\nwritten to {args.out}: {names}", as_json=args.json)
    return exit_status("sample", lost, args.n, remedy(guide, z.dtype))


def is_job(args: Args) -> bool:
    """Whether samples are to be drawn as a job; 10^9 is the most that one takes."""
    alone = len(args.plan) == 1 and not args.time_at and args.repeats == 1
    if args.format is not None or (LARGE <= args.n <= 10**9 and alone):
        return True
    if args.batch != "auto" or args.shard is not None or args.threads is not None:
        raise ValueError(
            "--batch, --shard and --threads belong to jobs: add --format npz, safetensors or png"
        )
    return False


def check(args: Args) -> None:
    """What can be wrong whatever the model is."""
    if args.n < 1 or args.repeats < 1 or any(not 1 <= b <= args.n for b in args.time_at):
        raise ValueError("-n and --repeats must be 1 or more, --time-at between 1 and -n")
    if args.seed < 0:
        raise ValueError(f"--seed must be 0 or more, not {args.seed}")
    check_plans(args.plan, args.tol, args.init)


def check_plans(plans: Sequence[str], tol: float | None, init: str | None) -> None:
    """--plan needs a plan, and what --tol and --init are for."""
    if not plans:
        raise ValueError("--plan needs at least one plan")
    if tol is None and init is None:
        return
    own = [plan for plan in plans if plan not in ("sequential", *SWEPT)]
    if own:
        raise ValueError(f"--tol and --init are for {' and '.join(SWEPT)}; {own[0]} carries its own")
    if not set(plans) & set(SWEPT):
        raise ValueError(f"--tol and --init are for {' and '.join(SWEPT)}; sequential decoding is exact")


def check_model(args: Args, flow: Flow) -> None:
    """What this model cannot do."""
    refuse_context(flow, "flow.sample")
    if args.denoise and not getattr(flow.config, "noise_std", 0.0):
        raise ValueError("--denoise: this flow was trained without Gaussian noise, leave it out")


def check_memory(args: Args, flow: Flow) -> None:
    """Refuse what does not fit at once."""
    # Noise is drawn in float64; then there are z and the answers of all plans in the flow's own type.
    need = args.n * math.prod(flow.latent_shape) * (8 + 4 * (2 + len(args.plan)))
    if need > memory():
        raise ValueError(
            f"-n {args.n} needs at least {need / 1e9:,.0f} GB of memory, this machine has "
            f"{memory() / 1e9:,.0f} GB: draw fewer at a time"
        )


def write(args: Args, flow: Flow, labels: Tensor | None, outs: dict[str, Decoded]) -> tuple[list[str], int]:
    """Samples and grids; returns the names of the files, and how many samples are not finite by some plan."""
    files, lost = [], torch.zeros(args.n, dtype=torch.bool)
    arrays: dict[str, Any] = {} if labels is None else {"labels": labels.numpy()}
    for name, out in zip(stems(list(outs)), outs.values(), strict=True):
        x = denoised(flow, out.x, labels) if args.denoise else out.x
        arrays[name] = x.cpu().numpy()
        lost |= nonfinite_rows(x)
        images = as_images(x)
        if images is not None:
            save_grid(images[:400], args.out / f"{name}.png", columns=columns(len(images), args.labels))
            files.append(f"{name}.png")
    np.savez_compressed(args.out / "samples.npz", **arrays)
    return [*files, "samples.npz"], int(lost.sum())


def exit_status(command: str, lost: int, n: int, advice: str) -> int:
    """1, and a line that says why, if samples are not finite; else 0."""
    if lost:
        note(f"jacobiflow {command}: {describe(lost, n, advice)}")
    return int(lost > 0)


def denoised(flow: Flow, x: Tensor, labels: Tensor | None, batch: int = 64) -> Tensor:
    """`flow.denoise` in batches: its gradient takes more memory than decoding did."""
    rows = [slice(i, i + batch) for i in range(0, len(x), batch)]
    return torch.cat([flow.denoise(x[r], labels=None if labels is None else labels[r]) for r in rows])


def stems(plans: Sequence[str]) -> list[str]:
    """A name for the files and arrays of each plan; plan files of the same name are numbered.

    >>> stems(["uniform", "a/fast.json", "b/fast.json", "labels.json"])
    ['uniform', 'fast', 'fast-2', 'labels-2']
    """
    used = {"labels", "file", "allow_pickle"}  # taken by other files and by np.savez
    found = []
    for plan in plans:
        stem = plan if plan in NAMED else Path(plan).stem
        name = next(s for i in itertools.count(1) if (s := f"{stem}-{i}" if i > 1 else stem) not in used)
        used.add(name)
        found.append(name)
    return found


def columns(n: int, labels: str | None) -> int:
    """Ten for the ten classes in turn, else about as many as rows."""
    return min(n, 10) if labels == "0-9" else min(16, math.ceil(math.sqrt(n)))


def show(rows: Sequence[Row]) -> str:
    """The table for people."""
    head = (
        "plan",
        "batch",
        "seconds",
        "speed-up",
        "sweeps a block",
        "largest dev.",
        "mean dev.",
        "backend",
        "status",
    )
    body = [
        (
            r.plan,
            str(r.batch),
            f"{r.seconds:.3f}",
            f"{r.speedup:.2f}x",
            " ".join(f"{s:.0f}" if s == round(s) else f"{s:.1f}" for s in r.sweeps),
            f"{r.largest:.2g}",
            f"{r.mean:.2g}",
            r.backend,
            r.summary,
        )
        for r in rows
    ]
    return table([head, *body])
