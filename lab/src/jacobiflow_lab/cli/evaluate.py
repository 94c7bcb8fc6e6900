"""`jacobiflow evaluate`."""

from __future__ import annotations

import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import fill
from typing import Annotated, Any, Literal

import torch
import tyro
from torch import Tensor

import jacobiflow
from jacobiflow.cli.options import (
    Device,
    GuidanceOptions,
    Seed,
    label_cycle,
    parse,
    pick_device,
    refuse_context,
    report,
)
from jacobiflow.core.processes import World, leave_process_group
from jacobiflow.core.progress import note, progress_bar
from jacobiflow.core.results import Decoded
from jacobiflow.core.tables import did_you_mean, table
from jacobiflow.data.decoding import Images
from jacobiflow.data.sources import DataConfig, Survey, load_images, survey
from jacobiflow.flows.checkpoint import load
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.lattice import evaluation as ising
from jacobiflow_lab.lattice.ising import Estimate
from jacobiflow_lab.lattice.lattice_flow import LatticeFlow
from jacobiflow_lab.metrics import METRICS, evaluate
from jacobiflow_lab.metrics.evaluation import default_plan
from jacobiflow_lab.metrics.registry import check_request, select
from jacobiflow_lab.metrics.samples import Scorers

ISING = "ising"
NAMES = (ISING, *METRICS)
IMAGES, FIELDS = 1000, 100_000  # samples by default


@dataclass(frozen=True, kw_only=True)
class Args:
    """Measure how good a model's samples are.

    Metrics:
    {metrics}

    fid and kid use features of the FID Inception network. Under torchrun many
    processes share the work.

    example: jacobiflow evaluate mnist --data mnist.npz --metrics fid kid paired
             jacobiflow evaluate ising-16 -n 100000 --json
             torchrun --nproc-per-node 8 -m jacobiflow.cli.main evaluate mnist ...
    """

    model: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="MODEL")]
    """A bundled name, a checkpoint folder or a hub id."""
    data: Annotated[str, tyro.conf.arg(metavar="SOURCE")] = ""
    """Real images: an .npz file, a folder or a Hugging Face dataset id."""
    metrics: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = ()
    """Names from above. Default: ising for a flow of an Ising model, else fid and kid."""
    n: Annotated[int | None, tyro.conf.arg(aliases=["-n"], metavar="N")] = None
    """Number of samples. Default: 1,000 images, or 100,000 fields of an Ising model."""
    real: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Number of real images. Default: as many as samples."""
    split: Literal["validation", "train"] = "validation"
    """Which real images: held-out ones, or those of training."""
    labels: Annotated[str, tyro.conf.arg(metavar="LABELS")] = "all"
    """Classes that samples take in turn: all, none, 3, 0-9 or 1,3,5-7."""
    plan: Annotated[str | None, tyro.conf.arg(metavar="PLAN")] = None
    """auto, sequential, uniform, selective or a JSON file. Default: auto; with --tol selective."""
    reference_plan: Annotated[str, tyro.conf.arg(metavar="PLAN")] = "sequential"
    """paired: the plan to compare with."""
    tol: Annotated[float | None, tyro.conf.arg(metavar="TOL")] = None
    """Tolerance of blocks that are swept. Default: the model's."""
    max_deviation: Annotated[float | None, tyro.conf.arg(metavar="BOUND")] = None
    """Plan auto: largest deviation from exact. Default: the model's own."""
    guidance: GuidanceOptions
    no_denoise: bool = False
    """Keep the noise of training in samples. Default: it is removed, if there was any."""
    noise: Annotated[Literal["gaussian", "dequantize", "binary", "none"] | None, tyro.conf.arg(metavar="NOISE")] = None
    """bpd: gaussian, dequantize, binary or none. Default: as the model was trained."""
    clip: Annotated[str, tyro.conf.arg(metavar="CLIP")] = ""
    """clip-iqa: a CLIP for transformers, as a folder or hub id."""
    seed: Seed = 0
    batch: Annotated[int | None, tyro.conf.arg(metavar="BATCH")] = None
    """Samples per batch. Default: 64 images, or 1,000 fields."""
    device: Device = "auto"
    json: bool = False
    """Print JSON instead of a table."""


def help_of_metrics() -> str:
    """One item per metric, with what the user has to give."""
    given = {"real": "--data", "clip": "--clip"}
    rows = [(m.name, m.help, [given[need] for need in m.needs if need in given]) for m in METRICS.values()]
    rows.append((ISING, "physics of flows of an Ising model; stands alone", []))
    texts = (f"- {name}: {text}" + (f" ({', '.join(flags)})" if flags else "") for name, text, flags in rows)
    return "\n    ".join(fill(text, 76, subsequent_indent=" " * 6) for text in texts)


Args.__doc__ = str(Args.__doc__).replace("{metrics}", help_of_metrics())


Measured = tuple[dict[str, Any], str]  # as JSON and as text


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="evaluate")
    args = replace(args, plan=args.plan or default_plan(args.tol))
    check(args)
    world = World.from_environment()
    try:
        found, text = work(args, world)
    finally:
        leave_process_group()
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
        "max_deviation": args.max_deviation,
        "threads": torch.get_num_threads(),
        "processes": world.size,
    }
    report(doc | found, text, as_json=args.json)


def check(args: Args) -> None:
    """Check what does not depend on the model."""
    counts = (args.n, args.real)
    if any(n is not None and n < 2 for n in counts) or (args.batch or 1) < 1 or args.seed < 0:
        raise ValueError("-n and --real must be 2 or more, --batch 1 or more and --seed 0 or more")
    if args.max_deviation is not None and args.plan != "auto":
        raise ValueError("--max-deviation is for plan auto: leave it out, or leave out --plan and --tol")
    for name in args.metrics:
        if name not in NAMES:
            raise ValueError(f"--metrics knows {', '.join(NAMES)}, not {name!r}{did_you_mean(name, NAMES)}")
    if ISING in args.metrics and len(set(args.metrics)) > 1:
        raise ValueError("--metrics ising is for fields and stands alone; the others are for images")


def work(args: Args, world: World) -> Measured:
    """What each process does: the first one finds whatever is wrong, then all share the work."""
    device, ready = world.device(pick_device(args.device)), list[tuple[Flow, Images | None]]()
    world.share(lambda: ready.append(prepare(args, device)))
    flow, images = ready[0] if world.leader else prepare(args, device)
    names = chosen(args, flow)
    found, text = measure_ising(args, flow, world) if ISING in names else measure(args, flow, images, world)
    return {"metrics": list(names), "device": str(device)} | found, text


def prepare(args: Args, device: torch.device) -> tuple[Flow, Images | None]:
    """The model and the data, checked against the options."""
    flow = load(args.model, device=device)
    refuse_context(flow, "jacobiflow_lab.metrics.evaluate")
    for plan, tol in ((args.plan, args.tol), (args.reference_plan, None)):
        if plan != "auto" or tol is not None:
            flow.plan(plan, tol=tol)
    names = chosen(args, flow)
    if ISING in names:
        ising.ising_of(flow)
        return flow, None
    args.guidance.for_flow(flow, args.labels)  # raises if this flow takes no guidance
    check_request(names, args.data, args.clip, samples=args.n or IMAGES, real=args.real)
    Scorers.load(select(names), None, args.clip, device)  # one process reports what is not installed
    return flow, load_data(args, flow) if args.data else None


def chosen(args: Args, flow: Flow) -> tuple[str, ...]:
    """The names of the metrics: those of --metrics, or the default for this model."""
    if args.metrics:
        return args.metrics
    if isinstance(flow, LatticeFlow):
        return (ISING,)
    if not args.data:
        raise ValueError(f"give --data for fid and kid, or choose with --metrics, of {', '.join(NAMES)}")
    return ("fid", "kid")


def load_data(args: Args, flow: Flow) -> Images:
    """Real images in the shape that the flow takes."""
    if flow.image_shape is None:
        raise ValueError(f"--data: samples of shape {list(flow.data_shape)} are not images")
    channels, side, _ = flow.image_shape
    classes = flow.num_classes if args.labels != "none" else 0
    config = DataConfig(source=args.data)
    compare(config, Survey(0, ((side, side),), channels, flow.num_classes))
    train, held = load_images(config, image_size=side, channels=channels, num_classes=classes)
    found = by_name(train if args.split == "train" else held, train.classes, flow)
    if int(found.pixels.max()) <= 1:
        raise ValueError(f"--data {args.data}: no pixel is above 1: store pixels from 0 to 255")
    if len(found) < 2:
        raise ValueError(f"--data {args.data} has {len(found)} images for --split {args.split}: 2 are needed")
    return found


def by_name(images: Images, names: Sequence[str], flow: Flow) -> Images:
    """The images with the model's class numbers, if both their classes and its own have names."""
    if images.labels is None or not names or not flow.class_names:
        return images
    number = {name.lower().replace("_", " "): i for i, name in enumerate(flow.class_names)}
    numbers = [number.get(name.lower().replace("_", " ")) for name in names]
    if None in numbers:
        strange = f"{names[numbers.index(None)]!r} is not a class of the model ({', '.join(flow.class_names)})"
        raise ValueError(f"--data: {strange}: rename the classes of the data, or give --labels none")
    return replace(images, labels=torch.tensor(numbers)[images.labels])


def compare(config: DataConfig, model: Survey) -> None:
    """Warn if the images of a source are not as the model's: they are converted, and may be other images."""
    data = survey(config)
    if str(data) != str(model):
        warnings.warn(
            f"the images of {config.source} are {data}, those of the model are {model}: they are converted, "
            "so check that these are the images that the model was trained on",
            stacklevel=2,
        )


def measure(args: Args, flow: Flow, images: Images | None, world: World) -> Measured:
    """Metrics of images."""
    labels: Any = "all" if args.labels == "all" else label_cycle(args.labels, flow.num_classes, flow.class_names)
    with Bars(world) as bars:
        found = evaluate(
            flow,
            images,
            metrics=chosen(args, flow),
            samples=args.n or IMAGES,
            plan=args.plan,
            reference_plan=args.reference_plan,
            tol=args.tol,
            max_deviation=args.max_deviation,
            labels=labels,
            guidance=args.guidance.for_flow(flow, args.labels),
            denoise=not args.no_denoise,
            noise=args.noise,
            seed=args.seed,
            batch=args.batch or 64,
            real=args.real,
            clip=args.clip or None,
            world=world,
            progress=bars,
        )
    rows = [row for name, result in found.results.items() for row in METRICS[name].text(result)]
    doc = found.to_dict()
    how = f"decoded by plan {args.plan}" + ("" if args.tol is None else f", tol {args.tol:g}")
    notes = [how] * bool(found.results.keys() - {"bpd"})
    notes += [result["note"] for result in doc["results"].values() if "note" in result]
    if found.not_finite:
        notes.append(f"{found.not_finite:,} samples are not finite and are left out")
    text = "\n".join([table([("metric", "value", "better", "of"), *rows]), "", *notes])
    return doc, text


class Bars:
    """Progress of the first process: a bar on a terminal, one line per kind of work elsewhere."""

    def __init__(self, world: World) -> None:
        self.world, self.what, self.bar = world, "", progress_bar(disable=True)

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
            self.bar = progress_bar(total=total, desc=what, unit="image")
        self.bar.update(done - self.bar.n)


def measure_ising(args: Args, flow: Flow, world: World) -> Measured:
    """Physics of the samples."""
    target, n = ising.ising_of(flow), args.n or FIELDS
    with progress_bar(total=n, unit="sample", disable=not world.leader) as bar:
        m = ising.evaluate(
            flow,
            samples=n,
            seed=args.seed,
            batch=args.batch or 1000,
            decode=distributed_decode(flow, args, world),
            progress=bar.update,
        )
    energy, magnet = m.reweighted_energy_per_site, m.reweighted_abs_magnetization
    lines: list[tuple[str, Estimate, Estimate | None, str]] = [
        ("energy per site", m.energy_per_site, energy, f"{m.exact_energy_per_site:.6f}"),
        ("|m|", m.abs_magnetization, magnet, estimate(m.monte_carlo_abs_magnetization)),
        ("effective sample size", m.effective_sample_size, None, "1"),
        ("log Z (raw: lower bound)", m.log_z_bound, m.reweighted_log_z, f"{m.exact_log_z:.4f}"),
    ]
    rows = [
        (name, estimate(raw), "" if again is None else estimate(again), known) for name, raw, again, known in lines
    ]
    lost = f"; {m.not_finite} of them are not finite and are left out" if m.not_finite else ""
    text = (
        f"{target.side} x {target.side} Ising model at T = {target.temperature:g}, "
        f"{m.samples:,} samples{lost}\n\n"
        f"{table([('', 'raw samples', 'reweighted', 'known'), *rows])}\n\n"
        "known: Kaufman's exact values; for |m| heat bath Monte Carlo"
    )
    versions = {"jacobiflow": jacobiflow.__version__, "torch": torch.__version__}
    about = {"versions": versions, "target": {"kind": "ising", **asdict(target)}}
    return about | m.to_dict(), text


def distributed_decode(flow: Flow, args: Args, world: World) -> Callable[[Tensor], Decoded]:
    """A decoder whose rows are split among the processes; each gets all results."""
    options: dict[str, Any] = {"tol": args.tol, "max_deviation": args.max_deviation, "n": args.batch or 1000}
    plan = world.share(lambda: flow.plan(args.plan, **options))
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
