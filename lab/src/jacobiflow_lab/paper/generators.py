"""The flow beside a GAN and a diffusion model (Table A6)."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.files import read_text
from jacobiflow.core.method import Plan
from jacobiflow.core.records import parse_json
from jacobiflow.training.recipe import Recipe
from jacobiflow_lab.baselines import TrainedBaseline, load_baseline
from jacobiflow_lab.baselines.baseline_floor import MOST_OF_FLOOR, counts, shuffle_pixels
from jacobiflow_lab.baselines.learner import BaselineError
from jacobiflow_lab.baselines.training import ABOUT, Kind
from jacobiflow_lab.metrics import Draw, as_pixels, evaluate_pictures, fid_of, kid, load_inception
from jacobiflow_lab.paper import figures
from jacobiflow_lab.paper.models import MODELS
from jacobiflow_lab.paper.quality import look, real
from jacobiflow_lab.paper.sampling import SAMPLES_AT_ONCE, TAU, denoise, draw, plan_for
from jacobiflow_lab.paper.schema import Doc, Item, Missing, PartiallyMissing, Picture, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import FID_BIAS, Column, Table
from jacobiflow_lab.paper.timing import clock

BASELINES: dict[Kind, str] = {"fastgan": "FastGAN", "ddim": "DDIM, 20 steps"}
SHUFFLED = "real images, pixels shuffled"
FLOW = "flow, selective"
SHOWN = 24  # samples of each in the picture


def source(task: Task, kind: Kind) -> str | Path:
    """A trained baseline of the model's data: --ddim, or the folder MODEL-KIND beside the models."""
    session, model, name = task.session, MODELS[task.model], f"{task.model}-{kind}"
    if kind == "ddim" and session.ddim:
        return session.ddim
    places = [base / name for base in (*session.models_dirs, session.out / "trained")]
    for path in places:
        if (path / ABOUT).is_file():
            return path
    if session.train_baseline is not None:
        session.train_baseline(kind, model, places[-1])
        return places[-1]
    data = (session.data_dir or Path()) / Recipe.load(model.recipe).data.source
    raise Missing(
        f"no weights: train it with `python -m jacobiflow_lab.baselines --kind {kind} --data {data} "
        f"--budget-seconds {3600 * model.hours:g} --flip --out models/{name}` and give --models-dir models, "
        "or add --train-missing" + (", or give any diffusers checkpoint as --ddim" if kind == "ddim" else "")
    )


def about(task: Task) -> Doc:
    """What training wrote about each baseline, or its name; None if there is none."""
    found: Doc = {}
    for kind in BASELINES:
        try:
            place = source(task, kind)
        except Missing:
            found[kind] = None
            continue
        written = Path(place) / ABOUT
        found[kind] = parse_json(read_text(written)) if written.is_file() else str(place)
    return {"baselines": found}


def needs(task: Task) -> None:
    """Every baseline. The flow's own row needs none."""
    missing = [BASELINES[kind] for kind, found in about(task)["baselines"].items() if found is None]
    if missing:
        raise PartiallyMissing(f"no weights of {' and '.join(missing)}")


def run(task: Task) -> Result:
    """Seconds per batch and FID of each by the same rules, and those of shuffled pixels, the floor."""
    scale, n, batch = task.scale, task.samples(), task.scale.batches[-1]
    known = real(task, n)
    plan = plan_for(task, "selective", batch)
    seen = look(task, plan, n, task.seed).moments
    rows: list[dict[str, Any]] = [
        {
            "method": FLOW,
            "seconds": batch_seconds(task, lambda start: one_batch(task, plan, batch, start), batch),
            "fid": fid_of(known, seen).value,
            "kid": kid(known, seen).value,
            "samples": seen.count,
            "parameters": sum(p.numel() for p in task.flow.parameters()),
            "minutes": 60 * MODELS[task.model].hours,
        }
    ]
    shown = {FLOW: draw(task, plan, SHOWN)}
    for kind, label in BASELINES.items():
        try:
            baseline = load_baseline(kind, source(task, kind), task.device)
        except (Missing, BaselineError) as error:
            rows.append({"method": label, "missing": str(error)})
            continue
        rows.append({"method": label} | size(task, kind, baseline) | measure(task, baseline, n, batch))
        shown[label] = as_pixels(baseline.sample(SHOWN, seed=task.seed))
    if measured := [row for row in rows[1:] if "fid" in row]:
        floor = {"method": SHUFFLED} | shuffled(task, n)
        for row in measured:
            row["counts"] = counts(row, floor)
        rows.append(floor)
    path = task.picture("generators")
    figures.grids(path, shown, columns=8, across=len(shown))
    return Result(
        data={"rows": rows, "tau": TAU},
        counts={"samples": n, "real_images": known.count, "batch": batch, "timed_batches": scale.repeats},
        pictures=(Picture(path.name, f"{task.model}: samples of each.", task.restricted),),
    )


def size(task: Task, kind: Kind, baseline: TrainedBaseline) -> Doc:
    """Parameters that sampling uses, and minutes of training, where they are known."""
    nets = [part for part in vars(baseline).values() if isinstance(part, torch.nn.Module)]
    training = about(task)["baselines"][kind]
    seconds = training.get("seconds") if isinstance(training, dict) else None
    return {
        "parameters": sum(p.numel() for net in nets for p in net.parameters()) or None,
        "minutes": None if seconds is None else seconds / 60,
    }


def one_batch(task: Task, plan: Plan, batch: int, start: int) -> Tensor:
    """What is timed of the flow: noise, decoding and denoising of one batch, without guidance."""
    z, labels = task.flow.noise(batch, task.seed, start=start), task.labels(batch, start)
    return denoise(task, task.flow.decode(z, plan, labels=labels).x, labels)


def batch_seconds(task: Task, sample: Callable[[int], Tensor], batch: int) -> float:
    """The mean over several batches, after one that pays for what is made at first use."""
    starts = [i * batch for i in range(task.scale.repeats + 1)]
    seconds = [clock(task.device, sample, start)[0] for start in starts]
    return statistics.fmean(seconds[1:])


def measure(task: Task, baseline: TrainedBaseline, n: int, batch: int) -> dict[str, Any]:
    """A baseline, measured as the flow is."""

    def sample(start: int, count: int) -> Tensor:
        return baseline.sample(count, seed=task.seed, start=start)

    seconds = batch_seconds(task, lambda start: sample(start, batch), batch)
    return {"seconds": seconds} | scores(task, sample, n)


def shuffled(task: Task, n: int) -> dict[str, Any]:
    """Test images with shuffled pixels: the same colours, no picture."""
    test = task.images[1].pixels
    generator = torch.Generator().manual_seed(task.seed)
    pixels = shuffle_pixels(test[torch.randint(len(test), (n,), generator=generator)], task.seed)
    pixels = pixels.to(task.device)
    return scores(task, lambda start, count: pixels[start : start + count], n)


def scores(task: Task, sample: Draw, n: int) -> dict[str, Any]:
    """FID and KID of n pictures, against the images that the flow's samples are compared with."""
    found = evaluate_pictures(
        sample,
        task.images[0],
        samples=n,
        seed=task.seed,
        batch=SAMPLES_AT_ONCE,
        network=load_inception(task.device),
        device=task.device,
    )
    assert found.fid is not None
    assert found.kid is not None
    return {"fid": found.fid.value, "kid": found.kid.value, "samples": n}


GENERATORS = Table(
    rows="rows",
    columns=(
        Column("method", "{method}"),
        Column("parameters", "{parameters:,}"),
        Column("trained, min", "{minutes:.0f}"),
        Column("seconds per batch", "{seconds:.3f}"),
        Column("FID", "{fid:.2f}", better="lower"),
        Column("KID", "{kid:.4f}", better="lower"),
        Column("samples", "{samples:,}"),
        Column("counts as a baseline", "{counts}", empty=""),
    ),
    note="Seconds of a batch, the flow's with noise and denoising. The GAN (skip-layer excitation, "
    "self-supervised discriminator) and the diffusion model are small networks, trained here for as long "
    f"as the flow; the paper took the official FastGAN and google/ddpm-cifar10-32. {FID_BIAS} A baseline "
    f"counts if FID and KID are below {MOST_OF_FLOOR:g} of those of shuffled pixels.",
)

ITEM = Item(
    name="generators",
    models=lambda scale: scale.generators,
    run=run,
    tables=(GENERATORS,),
    settings=about,
    needs=needs,
    minutes=lambda scale, model: 5.0,
)
