"""`jacobiflow sample`."""

from __future__ import annotations

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

from jacobiflow.analysis.compare import Row, compare, convergence
from jacobiflow.analysis.plots import save_convergence
from jacobiflow.cli.options import note, parse, parse_labels, pick_device, report, table
from jacobiflow.core.types import Decoded
from jacobiflow.data.pictures import save_grid
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance


@dataclass(frozen=True)
class Args:
    """Draw samples from a flow.

    Decodes the same noise with every --plan and says how long each took, how many sweeps its blocks
    needed and how far it is from exact sequential decoding. Into --out go a grid of each plan, the
    samples (samples.npz), the figures (report.json) and the convergence plot.

    example: jacobiflow sample mnist -n 64 --labels 0-9 --plan selective --out out
    """

    model: tyro.conf.Positional[str]
    """A bundled name, a checkpoint folder or a hub id."""
    n: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 16
    """How many samples."""
    labels: Annotated[str | None, tyro.conf.arg(metavar="LABELS")] = None
    """Classes, in turn: 3, 0-9 or 1,3,5-7. Left out: no label."""
    plan: tuple[str, ...] = ("selective",)
    """sequential, uniform, selective or a plan's JSON file; one or several."""
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
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    out: Path = Path("out")
    """Folder for what is written."""
    json: bool = False
    """Print JSON instead of a table."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="sample")
    if args.n < 1 or args.repeats < 1 or any(not 1 <= b <= args.n for b in args.time_at):
        raise ValueError("-n and --repeats must be 1 or more, --time-at between 1 and -n")
    if not args.plan:
        raise ValueError("--plan needs at least one plan")
    flow = load(args.model, device=pick_device(args.device))
    labels = parse_labels(args.labels, args.n, flow.num_classes)
    if flow.context_features:
        raise ValueError(
            "this flow needs context, which the command line cannot give; use flow.sample in Python"
        )
    guide = Guidance(weight=args.guidance, annealed=args.annealed, what=args.guide, attn_temp=args.attn_temp)
    args.out.mkdir(parents=True, exist_ok=True)

    def options(plan: str) -> dict[str, Any]:
        named = plan in ("uniform", "selective")
        found: dict[str, Any] = {"guidance": guide} if guide.weight else {}
        return found | ({"tol": args.tol, "init": args.init} if named else {})

    def condition(batch: int) -> dict[str, Any]:
        return {} if labels is None else {"labels": labels[:batch]}

    for plan in args.plan:  # a wrong plan is found before any work is done
        flow.plan(plan, **{k: v for k, v in options(plan).items() if k != "guidance"})
    z = flow.noise(args.n, args.seed)
    rows, outs = compare(
        flow,
        z,
        args.plan,
        [*args.time_at, args.n],
        repeats=args.repeats,
        options=options,
        condition=condition,
        progress=lambda text: note(f"decoding {text}"),
    )
    files = write(args, flow, labels, z, {p: outs[p] for p in args.plan}, guide, condition)
    doc = {
        "model": args.model,
        "n": args.n,
        "seed": args.seed,
        "labels": args.labels,
        "threads": torch.get_num_threads(),
        "device": str(z.device),
        "repeats": args.repeats,
        "rows": [asdict(r) for r in rows],
        "files": files,
    }
    (args.out / "report.json").write_text(json.dumps(doc, indent=2) + "\n", encoding="utf-8")
    text = f"{show(rows)}\n\nwritten to {args.out}: {', '.join([*files, 'report.json'])}"
    report(doc, text, as_json=args.json)


def write(
    args: Args,
    flow: Flow,
    labels: Tensor | None,
    z: Tensor,
    outs: dict[str, Decoded],
    guide: Guidance,
    condition: Any,
) -> list[str]:
    """Samples, grids and the convergence plot; returns the names of the files."""
    files = []
    arrays: dict[str, Any] = {} if labels is None else {"labels": labels.numpy()}
    for plan, out in outs.items():
        name = Path(plan).stem
        x = flow.denoise(out.x, labels=labels) if args.denoise else out.x
        arrays[name] = x.detach().cpu().numpy()
        images = as_images(x)
        if images is not None:
            save_grid(images[:400], args.out / f"{name}.png", columns=columns(len(images), args.labels))
            files.append(f"{name}.png")
    np.savez_compressed(args.out / "samples.npz", **arrays)
    few = z[:8]
    extra = condition(len(few)) | ({"guidance": guide} if guide.weight else {})
    blocks = convergence(flow, few, **extra)
    save_convergence(
        blocks, args.out / "convergence.png", title=f"{args.model}: sweeps against one position a step"
    )
    return [*files, "samples.npz", "convergence.png"]


def as_images(x: Tensor) -> Tensor | None:
    """Samples as pictures [N, C, H, W], if they can be."""
    if x.ndim == 4:
        return x
    side = math.isqrt(x.shape[1])
    return x.reshape(-1, 1, side, side) if side > 3 and side**2 == x.shape[1] else None


def columns(n: int, labels: str | None) -> int:
    """Ten for the ten classes in turn, else about as many as rows."""
    return 10 if labels == "0-9" else max(1, min(16, math.ceil(math.sqrt(n))))


def show(rows: Sequence[Row]) -> str:
    """The table for people."""
    head = ("plan", "batch", "seconds", "speed-up", "sweeps a block", "largest dev.", "mean dev.", "status")
    body = [
        (
            r.plan,
            str(r.batch),
            f"{r.seconds:.3f}",
            f"{r.speedup:.2f}x",
            " ".join(f"{s:.0f}" if s == round(s) else f"{s:.1f}" for s in r.sweeps),
            f"{r.largest:.2g}",
            f"{r.mean:.2g}",
            r.status.lower(),
        )
        for r in rows
    ]
    return table([head, *body])
