"""The flow beside a GAN and a diffusion model (Table A6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.files import read_text
from jacobiflow.core.records import parse_json
from jacobiflow_lab.analysis.plots import save_grids
from jacobiflow_lab.analysis.runtime import Clock
from jacobiflow_lab.baselines import TrainedBaseline, load_baseline
from jacobiflow_lab.baselines.learner import BaselineError
from jacobiflow_lab.baselines.training import ABOUT, Kind
from jacobiflow_lab.metrics import Moments, as_pixels, fid_of, kid, load_inception
from jacobiflow_lab.metrics.distributed_map import DistributedMap
from jacobiflow_lab.metrics.samples import Draw, Sampling, Scorers, collect
from jacobiflow_lab.paper.models import MODELS
from jacobiflow_lab.paper.quality import fid_thirds, real
from jacobiflow_lab.paper.sampling import SAMPLES_AT_ONCE, to_pixels
from jacobiflow_lab.paper.schema import Doc, Item, Missing, PartiallyMissing, Result
from jacobiflow_lab.paper.session import Task

BASELINES: dict[Kind, str] = {"fastgan": "FastGAN", "ddim": "DDIM, 20 steps"}
SHUFFLED = "real images, pixels shuffled"
FLOW = "flow, selective"
SHOWN = 24  # samples of each in the picture
MOST_OF_FLOOR = 0.7  # a baseline counts if its FID and KID are below this share of the floor's


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
    other = ", or give any diffusers checkpoint as --ddim" if kind == "ddim" else ""
    raise Missing(f"no weights: add --train-missing, which trains it for {model.hours:g} h{other}")


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
    scale, batch = task.scale, task.scale.batches[-1]
    n = task.session.samples or scale.few or task.samples()
    known = real(task, n)
    flow = Sampling(flow=task.flow, plan=task.plan("selective"), seed=task.seed)
    guided = replace(flow, guidance=task.session.annealed_guidance)
    own: Doc = {"parameters": sum(p.numel() for p in task.flow.parameters())}
    own |= {"minutes": 60 * MODELS[task.model].hours}
    rows: list[Doc] = [{"method": FLOW} | own | seconds(task, flow, batch) | scores(task, known, guided, n)]
    shown = {FLOW: to_pixels(guided(0, SHOWN))}
    for kind, label in BASELINES.items():
        try:
            baseline = load_baseline(kind, source(task, kind), task.device)
        except (Missing, BaselineError) as error:
            rows.append({"method": label, "missing": str(error)})
            continue
        sample = partial(_sample, baseline, task.seed)
        found = size(task, kind, baseline) | seconds(task, sample, batch) | scores(task, known, sample, n)
        rows.append({"method": label} | found)
        shown[label] = as_pixels(sample(0, SHOWN))
    if measured := [row for row in rows[1:] if "fid" in row]:
        floor = {"method": SHUFFLED} | scores(task, known, shuffled(task, n), n)
        for row in measured:
            row["counts"] = counts(row, floor)
        rows.append(floor)
    caption = f"{task.model}: samples of each."
    grids = partial(save_grids, panels=shown, columns=8, across=len(shown))
    return Result(
        data={"rows": rows, "tau": scale.tau},
        counts={"samples": n, "real_images": known.count, "batch": batch, "timed_batches": scale.repeats},
        pictures=(task.picture("generators", caption, grids, restricted=task.restricted),),
    )


def _sample(baseline: TrainedBaseline, seed: int, start: int, count: int) -> Tensor:
    return baseline.sample(count, seed=seed, start=start)


def size(task: Task, kind: Kind, baseline: TrainedBaseline) -> Doc:
    """Parameters that sampling uses, and minutes of training, where they are known."""
    nets = [part for part in vars(baseline).values() if isinstance(part, torch.nn.Module)]
    training = about(task)["baselines"][kind]
    seconds = training.get("seconds") if isinstance(training, dict) else None
    return {
        "parameters": sum(p.numel() for net in nets for p in net.parameters()) or None,
        "minutes": None if seconds is None else seconds / 60,
    }


def seconds(task: Task, sample: Draw, batch: int) -> Doc:
    """The mean over several batches, after one that pays for what is made at first use, and its error."""
    found = []
    for i in range(task.scale.repeats + 1):
        clock = Clock(task.device)
        sample(i * batch, batch)
        found.append(clock.seconds())
    times = torch.tensor(found[1:])
    error = float(times.std() / len(times) ** 0.5) if len(times) > 1 else 0.0
    return {"seconds": float(times.mean()), "seconds_spread": 2 * error}


def shuffled(task: Task, n: int) -> Draw:
    """Test images with shuffled pixels: the same colours, no picture."""
    test = task.images[1].pixels
    generator = torch.Generator().manual_seed(task.seed)
    pixels = shuffle_pixels(test[torch.randint(len(test), (n,), generator=generator)], task.seed)
    return lambda start, count: pixels[start : start + count].to(task.device)


def shuffle_pixels(pixels: Tensor, seed: int = 0) -> Tensor:
    """Images [N, C, H, W], each with its pixels in a random order: the same colours, no picture."""
    flat = pixels.flatten(2)
    draw = torch.Generator().manual_seed(seed)
    order = torch.rand(len(flat), 1, flat.shape[2], generator=draw).argsort(2).to(pixels.device)
    return flat.gather(2, order.expand_as(flat)).reshape(pixels.shape)


def counts(scores: Mapping[str, Any], floor: Mapping[str, Any]) -> bool:
    """Whether samples clearly beat shuffled images, by both "fid" and "kid"."""
    return all(scores[key] < MOST_OF_FLOOR * floor[key] for key in ("fid", "kid"))


def scores(task: Task, known: Moments, sample: Draw, n: int) -> Doc:
    """FID and KID of n pictures, and the largest deviation of FID over three disjoint thirds of them."""
    work = DistributedMap(batch=SAMPLES_AT_ONCE)
    seen = collect(sample, n, Scorers(load_inception(task.device)), work, stored=True).moments
    return {
        "fid": fid_of(known, seen).value,
        "fid_spread": fid_thirds(known, seen)[1],
        "kid": kid(known, seen).value,
        "samples": seen.count,
    }


ITEM = Item(
    name="generators",
    models=lambda scale: scale.generators,
    run=run,
    settings=about,
    needs=needs,
    minutes=lambda scale, model: 12.0,
)
