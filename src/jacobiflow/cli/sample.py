"""`jacobiflow sample`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch

from jacobiflow.cli import options as cli
from jacobiflow.core.arguments import as_int
from jacobiflow.core.files import write_bytes
from jacobiflow.core.hardware import require_memory
from jacobiflow.core.pictures import SHOWN, as_images, save_images
from jacobiflow.core.progress import note
from jacobiflow.core.results import Status
from jacobiflow.flows.checks import remedy, warn_if_loose
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.plans import PLANS, SWEPT
from jacobiflow.jobs.manifest import FILE as MANIFEST
from jacobiflow.jobs.sampling import Format, Samples, Settings, draw

LARGE_JOB = 100_000  # samples that are drawn as a large job without --format
MAX_JOB = 10**9  # samples of a job; more take several seeds
BATCH, DENOISING_BATCH = 256, 64  # of samples that are not a large job
FILES = ("samples.png", "samples.npz")


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Large jobs: -n 100,000 or more, or --format."""

    format: Annotated[Format | None, cli.arg(metavar="FORMAT")] = None
    """Write shards: npz, safetensors or png. Default: npz."""
    batch: Annotated[Literal["auto"] | int, cli.arg(metavar="N")] = "auto"
    """Samples per batch; auto is as memory allows."""
    shard: cli.Number = None  # Samples per shard. Default: about 1,000, and at most 64 MB.
    max_memory: Annotated[float, cli.arg(metavar="GB")] = 0.0
    """Memory per process; larger batches are split. 0: all that is free."""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Draw samples from a flow.

    Writes samples.npz and, for images, the grid samples.png into --out. With
    --format, or 100,000 samples and more, it writes shards instead; rerun the
    command to resume. `jacobiflow bench` compares plans.

    example: jacobiflow sample mnist -n 64 --labels 0-9 --out out
             jacobiflow sample mnist -n 1000000 --format npz --out million
    """

    flow: cli.FlowOptions
    n: Annotated[int, cli.arg(metavar="N", aliases=["-n"])] = 16  # How many samples.
    plan: Annotated[str | None, cli.arg(metavar="PLAN")] = None
    """auto, sequential, uniform, selective or a JSON file. Default: auto; with --tol or --init selective."""
    denoise: bool = False  # Remove the noise of training from images, by one gradient step.
    check: bool = False  # Print the residual, the largest |encode(x) - z|.
    out: cli.Folder = Path("out")  # Folder to write into.
    force: cli.Force = False
    json: cli.Json = False
    decoding: cli.DecodingOptions
    guidance: cli.GuidanceOptions
    job: JobOptions


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit status is 1 if samples are not finite."""
    args = cli.parse(Args, argv, command="sample")
    as_int("-n", args.n, 1, MAX_JOB)
    plan = args.plan or args.decoding.default_plan
    args.decoding.check([plan])
    large = args.job.format is not None or args.n >= LARGE_JOB
    return (draw_large if large else draw_small)(replace(args, plan=plan))


def settings(args: Args, flow: Flow) -> Settings:
    """What the options ask for."""
    cli.refuse_context(flow, "flow.sample")
    args.guidance.for_flow(flow, args.flow.labels, args.decoding.backend)
    return Settings(
        n=args.n,
        labels=cli.label_cycle(args.flow.labels, flow.num_classes, flow.class_names),
        plan=args.plan if args.plan in PLANS else flow.plan(args.plan).to_json(),
        denoise=args.denoise,
        device=next(flow.parameters()).device.type,
        threads=args.flow.threads or 1,
        **{name: value for name, value in asdict(args.job).items() if value not in (None, "auto")},
        **asdict(args.decoding),
        **asdict(args.guidance),
    )


def draw_small(args: Args) -> int:
    """Draw all samples in memory and write them."""
    if args.job != JobOptions():
        raise ValueError("--batch and --shard belong to large jobs: add --format npz, safetensors or png")
    flow = args.flow.load("flow.sample")
    asked = settings(args, flow)
    asked.check(flow)
    require_memory(f"-n {args.n}", 16 * args.n * math.prod(flow.latent_shape), "draw fewer, or add --format npz")
    if (args.out / MANIFEST).exists():
        raise ValueError(f"{args.out} holds a job of shards: choose another --out")
    cli.make_folder(args.out, FILES, force=args.force)
    batch = min(args.n, DENOISING_BATCH if args.denoise else BATCH)
    plan = asked.resolve_plan(flow, batch)
    check = args.check or args.plan in SWEPT  # the other plans bound the deviation
    samples = draw(asked, plan, flow, range(args.n), batch, check=check, progress=True)
    files = write(samples, args.out, 10 if args.flow.labels == "0-9" and args.n >= 10 else None)
    stats, nonfinite = samples.stats, samples.status["NONFINITE"]
    worst = max((Status[name] for name in samples.status), key=lambda s: s.rank)
    residual = None if stats.residual is None else float(stats.residual.max())
    doc = {"backend": stats.backend, "seconds": stats.seconds, "residual": residual, "status": worst.name}
    doc |= {"nonfinite": nonfinite, "out": str(args.out), "files": files, "model": args.flow.model}
    doc |= {"n": args.n, "plan": args.plan, "labels": args.flow.labels, "seed": args.decoding.seed}
    exactness = "" if residual is None else f", residual {residual:.2g}"
    if stats.residual is not None and args.decoding.tol is not None:
        warn_if_loose(args.decoding.tol, stats.residual)
    ended = f"worst status {worst.words}"
    if stats.loose and not worst.failed:
        ended, exactness = "far from exact", exactness + " (lower --tol, or use --plan auto)"
    text = (
        f"{args.n:,} samples, plan {args.plan}, backend {stats.backend}, {stats.seconds:.3f} s, "
        f"{ended}{exactness}, in {args.out}: {', '.join(files)}"
    )
    cli.report(doc, text, as_json=args.json)
    return cli.exit_status("sample", nonfinite, args.n, remedy(asked.guidance, samples.x.dtype))


def write(samples: Samples, folder: Path, columns: int | None) -> list[str]:
    """samples.npz and, for images, samples.png; returns their names."""
    arrays: dict[str, Any] = {"x": samples.x.numpy()}
    if samples.labels is not None:
        arrays["labels"] = samples.labels.numpy()
    np.savez_compressed(stream := BytesIO(), **arrays)
    write_bytes(folder / "samples.npz", stream.getvalue())
    if as_images(samples.x[:1]) is None:
        (folder / "samples.png").unlink(missing_ok=True)  # of an earlier run
        return ["samples.npz"]
    save_images(samples.x[:SHOWN], folder / "samples.png", columns=columns)
    return list(FILES)


def draw_large(args: Args) -> int:
    """Draw the samples as a job of shards, or resume it."""
    from jacobiflow.jobs.runner import run  # needs the file locks of a Unix

    if args.check:
        raise ValueError("--check is for samples in memory: leave it out, or draw fewer without --format")
    if args.job.batch != "auto":
        as_int("--batch", args.job.batch, 1)
    if args.job.shard is not None:
        as_int("--shard", args.job.shard, 1, 100_000)
    outcome = run(args.flow.model, args.out, args.flow.find_device(), partial(settings, args), note)
    if outcome is None:  # the first process reports
        return 0
    job = outcome.job
    doc = {"model": job.model, "out": str(args.out), "batch": job.batch, "shard": job.shard, "shards": job.count}
    doc |= {k: v for k, v in vars(outcome).items() if k != "job"} | {"settings": asdict(job.settings)}
    cli.report(doc, outcome.summary(args.out), as_json=args.json)
    advice = remedy(job.settings.guidance, getattr(torch, job.dtype))
    return cli.exit_status("sample", outcome.nonfinite, args.n, advice)
