"""`jacobiflow evaluate`."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

import jacobiflow
from jacobiflow.cli.options import label_cycle, note, parse, pick_device, refuse_context, report, table
from jacobiflow.core.processes import World, leave
from jacobiflow.core.types import Decoded
from jacobiflow.data.ising import Estimate
from jacobiflow.data.sources import DataConfig, Images, load_images
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow_lab import metrics
from jacobiflow_lab.metrics import ising

KNOWN = ("ising", *metrics.METRICS)


@dataclass(frozen=True, kw_only=True)
class Args:
    """Measure how good a model's samples are.

    - fid, kid: how far samples are from real images (--data), in features of
      the FID Inception network; FID is biased at small counts, KID is not
    - brisque (lower is better), clip-iqa (higher is better, needs --clip):
      quality of each sample by itself
    - bpd, reconstruction: bits per dimension of real images, and what is left
      of them after encoding and decoding
    - paired: distance of samples from what --reference-plan makes of their noise
    - ising: physics of flows that were trained for an Ising model

    Many processes share the work under torchrun.

    example: jacobiflow evaluate mnist --data mnist.npz --metrics fid kid paired
             jacobiflow evaluate ising-16 -n 100000 --json
             torchrun --nproc-per-node 8 -m jacobiflow.cli.main evaluate mnist ...
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A bundled name, a checkpoint folder or a hub id."""
    data: Annotated[str, tyro.conf.arg(metavar="SOURCE")] = ""
    """Real images: an .npz file, a folder or a Hugging Face dataset id."""
    metrics: tuple[str, ...] = ()
    """Which. Left out: ising for a flow of an Ising model, else fid and kid."""
    n: Annotated[int | None, tyro.conf.arg(aliases=["-n"], metavar="N")] = None
    """How many samples. Left out: 1,000 images, 100,000 fields of an Ising model."""
    real: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """How many real images. Left out: as many as samples."""
    split: Literal["validation", "train"] = "validation"
    """Which part of the data: held-out images, or those of training."""
    labels: str = "all"
    """Classes that samples take in turn: all, none, 3, 0-9 or 1,3,5-7."""
    plan: str = "selective"
    """sequential, uniform, selective, auto or a plan's JSON file."""
    reference_plan: str = "sequential"
    """paired: the plan to compare with."""
    tol: Annotated[float | None, tyro.conf.arg(metavar="TOL")] = None
    """Largest last update of swept blocks. Left out: the model's own."""
    guidance: float = 0.0
    """Weight of guidance, towards the labels."""
    guide: Literal["a", "b", "ab"] = "ab"
    """What guidance acts on: log-scale, shift or both."""
    annealed: bool = False
    """Let guidance grow along the sequence."""
    attn_temp: float = 1.0
    """Attention temperature of the twin that guidance leads away from."""
    denoise: bool = True
    """Remove the noise of training, if there was, from samples."""
    noise: Annotated[
        Literal["gaussian", "dequantize", "binary", "none"] | None, tyro.conf.arg(metavar="NOISE")
    ] = None
    """bpd: gaussian, dequantize, binary or none. Left out: by the model's config."""
    clip: Annotated[str, tyro.conf.arg(metavar="CLIP")] = ""
    """clip-iqa: a CLIP for transformers, as a folder or hub id."""
    seed: int = 0
    """Sample i depends on (seed, i) only."""
    batch: Annotated[int | None, tyro.conf.arg(metavar="BATCH")] = None
    """Samples at a time. Left out: 64 images, 1,000 fields."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    json: bool = False
    """Print JSON instead of a table."""


@dataclass(frozen=True)
class Found:
    """What was measured, for programs and for people."""

    doc: dict[str, Any]
    text: str


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="evaluate")
    check(args)
    world = World.from_environment()
    try:
        found = work(args, world)
    finally:
        leave()
    if not world.leader:
        return
    doc: dict[str, Any] = {
        "command": shlex.join(["jacobiflow", "evaluate", *map(str, argv)]),
        "model": args.model,
        "data": args.data or None,
        "split": args.split if args.data else None,
        "seed": args.seed,
        "plan": args.plan,
        "tol": args.tol,
        "threads": torch.get_num_threads(),
        "processes": world.size,
    }
    report(doc | found.doc, found.text, as_json=args.json)


def check(args: Args) -> None:
    """What can be wrong whatever the model is."""
    counts = (args.n, args.real)
    if any(n is not None and n < 2 for n in counts) or (args.batch or 1) < 1 or args.seed < 0:
        raise ValueError("-n and --real must be 2 or more, --batch 1 or more and --seed 0 or more")
    for name in args.metrics:
        if name not in KNOWN:
            raise ValueError(f"--metrics knows {', '.join(KNOWN)}, not {name!r}")
    if "ising" in args.metrics and len(set(args.metrics)) > 1:
        raise ValueError("--metrics ising is for fields and stands alone; the others are for images")


def work(args: Args, world: World) -> Found:
    """What each process does: the first one finds whatever is wrong, then all do their share."""
    device, ready = world.device(pick_device(args.device)), list[tuple[Flow, Images | None]]()
    world.share(lambda: ready.append(prepare(args, device)))
    flow, images = ready[0] if world.leader else prepare(args, device)
    names = chosen(args, flow)
    found = measure_ising(args, flow, world) if "ising" in names else measure(args, flow, images, world)
    return replace(found, doc={"metrics": list(names), "device": str(device)} | found.doc)


def prepare(args: Args, device: torch.device) -> tuple[Flow, Images | None]:
    """The model and the data, checked against what is asked for."""
    flow = load(args.model, device=device)
    refuse_context(flow, "jacobiflow_lab.metrics.evaluate")
    for plan, tol in ((args.plan, args.tol), (args.reference_plan, None)):
        if plan != "auto" or tol is not None:
            flow.plan(plan, tol=tol)
    names = chosen(args, flow)
    if "ising" in names:
        ising.target_of(flow)
        return flow, None
    flow.bound_blocks(1, guidance=guide(args))  # raises if this flow takes no guidance
    metrics.check_request(names, args.data, args.clip, samples=args.n or 1000, real=args.real)
    metrics.Judges.of(
        frozenset(names), None, args.clip, device
    )  # what is not installed is said by one process
    return flow, load_data(args, flow) if args.data else None


def chosen(args: Args, flow: Flow) -> tuple[str, ...]:
    """The metrics that were asked for, or those that a model was made for."""
    if args.metrics:
        return args.metrics
    if (flow.target or {}).get("kind") == "ising":
        return ("ising",)
    if not args.data:
        raise ValueError(f"give --data for fid and kid, or choose with --metrics, of {', '.join(KNOWN)}")
    return ("fid", "kid")


def load_data(args: Args, flow: Flow) -> Images:
    """Real images in the shape that the flow takes."""
    shape = flow.data_shape
    if len(shape) == 1:
        side = math.isqrt(shape[0])
        if side**2 != shape[0]:
            raise ValueError(f"--data: samples of {shape[0]} numbers are no pictures")
        shape = (1, side, side)
    classes = flow.num_classes if args.labels != "none" else 0
    train, held = load_images(
        DataConfig(source=args.data), image_size=shape[1], channels=shape[0], num_classes=classes
    )
    found = train if args.split == "train" else held
    if len(found) < 2:
        raise ValueError(f"--data {args.data} has {len(found)} images for --split {args.split}: 2 are needed")
    return found


def guide(args: Args) -> Guidance:
    """The guidance that the options describe."""
    return Guidance(weight=args.guidance, annealed=args.annealed, what=args.guide, attn_temp=args.attn_temp)


def measure(args: Args, flow: Flow, images: Images | None, world: World) -> Found:
    """Metrics of images."""
    every = args.labels == "all"
    with Bars(world) as bars:
        found = metrics.evaluate(
            flow,
            images,
            metrics=chosen(args, flow),
            samples=args.n or 1000,
            plan=args.plan,
            reference_plan=args.reference_plan,
            tol=args.tol,
            labels="all" if every else label_cycle(args.labels, flow.num_classes),
            guidance=guide(args),
            denoise=args.denoise,
            noise=args.noise,
            seed=args.seed,
            batch=args.batch or 64,
            real=args.real,
            clip=args.clip or None,
            world=world,
            progress=bars,
        )
    return Found(found.to_dict(), show(found, args))


def show(found: metrics.Report, args: Args) -> str:
    """The table for people, and what has to be said beside it."""
    rows: list[tuple[str, str, str, str]] = [("metric", "value", "better", "of")]
    notes: list[str] = []
    if (f := found.fid) is not None:
        rows.append(("FID", f"{f.value:.3f}", "lower", f"{f.samples:,} samples, {f.real:,} real"))
        notes.append(f.note)
    if (k := found.kid) is not None:
        count = f"{k.subsets} subsets of {k.subset_size:,}"
        rows.append(("KID", f"{k.value:.5f} ± {k.std:.5f}", "lower", count))
        notes.append("KID: mean and standard deviation over subsets")
    if (b := found.brisque) is not None:
        rows.append(("BRISQUE", f"{b.value:.2f} ± {b.error:.2f}", "lower", f"{b.images:,} samples"))
        notes.append(f"BRISQUE: {b.note}")
    if (c := found.clip_iqa) is not None:
        rows.append(("CLIP-IQA", f"{c.value:.4f} ± {c.error:.4f}", "higher", f"{c.images:,} samples"))
    if (d := found.bpd) is not None:
        rows.append(("bits per dim", f"{d.value:.4f} ± {d.error:.4f}", "lower", f"{d.images:,} real"))
        notes.append(f"bits per dim: {d.note}")
    if (r := found.reconstruction) is not None:
        rows.append(("reconstruction, mean square", f"{r.mse:.3g}", "lower", f"{r.images:,} real"))
        rows.append(("reconstruction, largest", f"{r.largest:.3g}", "lower", f"{r.images:,} real"))
    if (i := found.invertibility) is not None:
        rows.append(("|encode(decode(z)) - z|", f"{i.mean:.3g}", "lower", f"{i.samples:,} samples"))
    if (p := found.paired) is not None:
        rows.append(("paired distance", f"{p.value:.4f} ± {p.error:.4f}", "lower", f"{p.samples:,} samples"))
        rows.append(("  of what samples differ by", f"{p.relative:.2%}", "lower", f"spread {p.spread:.3f}"))
        notes.append(f"paired: with {args.reference_plan} decoding of the same noise")
    if found.not_finite:
        notes.append(f"{found.not_finite:,} samples have no finite answer and are left out")
    return "\n".join([table(rows), "", *notes])


class Bars:
    """Progress of the first process: a bar on a terminal, a line for each kind of work elsewhere."""

    def __init__(self, world: World) -> None:
        self.world, self.what, self.bar = world, "", tqdm(disable=True)

    def __enter__(self) -> Bars:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.world.leader:
            return
        if what != self.what:
            self.bar.close()
            self.what = what
            share = f", by each of {self.world.size} processes" if self.world.size > 1 else ""
            if not sys.stderr.isatty():
                note(f"measuring {what}: {total:,}{share}")
            self.bar = tqdm(total=total, desc=what, unit="image", dynamic_ncols=True, disable=None)
        self.bar.update(done - self.bar.n)


def measure_ising(args: Args, flow: Flow, world: World) -> Found:
    """Physics of the samples."""
    target, n = ising.target_of(flow), args.n or 100_000
    disable = None if world.leader else True
    with tqdm(total=n, unit="sample", dynamic_ncols=True, disable=disable) as bar:
        m = ising.evaluate(
            flow,
            samples=n,
            seed=args.seed,
            batch=args.batch or 1000,
            decode=dealt(flow, args, world),
            progress=bar.update,
        )

    def row(name: str, raw: Estimate, again: Estimate | None, known: str) -> tuple[str, str, str, str]:
        return name, estimate(raw), "" if again is None else estimate(again), known

    rows = [
        ("", "raw samples", "reweighted", "known"),
        row(
            "energy per site",
            m.energy_per_site,
            m.reweighted_energy_per_site,
            f"{m.exact_energy_per_site:.6f}",
        ),
        row(
            "|m|",
            m.abs_magnetization,
            m.reweighted_abs_magnetization,
            estimate(m.monte_carlo_abs_magnetization),
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
    versions = {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__}
    return Found({"versions": versions, "target": target.to_dict(), **m.to_dict()}, text)


def dealt(flow: Flow, args: Args, world: World) -> Callable[[Tensor], Decoded]:
    """A decoder whose rows are dealt out to the processes; each gets all answers."""
    plan = flow.plan(args.plan, tol=args.tol)
    if world.size == 1:
        return lambda z: flow.decode(z, plan, warn=False)

    def decode(z: Tensor) -> Decoded:
        out = flow.decode(z.tensor_split(world.size)[world.rank], plan, warn=False)
        parts = world.gather((out.x.cpu(), out.log_det.cpu()), None)
        x, log_det = (torch.cat(some).to(z.device) for some in zip(*parts, strict=True))
        return replace(out, x=x, log_det=log_det)

    return decode


def estimate(e: Estimate) -> str:
    """A value and its standard error."""
    return f"{e.value:.5g} ± {e.error:.2g}"
