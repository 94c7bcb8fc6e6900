"""The flow beside a GAN and a diffusion model (Table A6)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.core.records import parse_json, read_text
from jacobiflow.training.recipe import Recipe
from jacobiflow_lab.baselines import Generator, load_baseline
from jacobiflow_lab.baselines.learner import BaselineError
from jacobiflow_lab.baselines.training import ABOUT, Kind
from jacobiflow_lab.baselines.worth import CLEARLY, counts, shuffle_pixels
from jacobiflow_lab.metrics import as_pixels, evaluate_pictures, fid_of, kid, load_inception
from jacobiflow_lab.metrics.pictures import Draw
from jacobiflow_lab.paper import drawing, paper_figures
from jacobiflow_lab.paper.item import (
    BIASED,
    Cell,
    Doc,
    Docs,
    Figure,
    Item,
    Lacking,
    Missing,
    Picture,
    Result,
    Table,
    missing_rows,
    present,
)
from jacobiflow_lab.paper.models import MODELS
from jacobiflow_lab.paper.quality import look, real
from jacobiflow_lab.paper.workshop import AT_ONCE, TAU, Context

BASELINES: dict[Kind, str] = {"fastgan": "FastGAN", "ddim": "DDIM, 20 steps"}
SHUFFLED = "real images, pixels shuffled"
FLOW = "selective"


def source(context: Context, kind: Kind) -> str | Path:
    """Where a trained baseline of the model's data is: the folder MODEL-KIND beside the models; or --ddim."""
    shop, name = context.workshop, f"{context.model}-{kind}"
    if kind == "ddim" and shop.ddim:
        return shop.ddim
    places = [base / name for base in (*shop.models_dirs, shop.out / "trained")]
    found = next((path for path in places if (path / ABOUT).is_file()), None)
    if found is None and shop.train_baseline is not None:
        found = places[-1]
        shop.train_baseline(kind, MODELS[context.model], found)
    if found is None:
        raise Missing(
            f"no weights: train it with `python -m jacobiflow_lab.baselines --kind {kind} --data "
            f"{shop.data_dir / Recipe.load(MODELS[context.model].recipe).data.source} --budget-seconds "
            f"{3600 * MODELS[context.model].hours:g} --flip --out models/{name}` and give --models-dir "
            "models, or add --train-missing"
            + (", or give any diffusers checkpoint as --ddim" if kind == "ddim" else "")
        )
    return found


def baseline(context: Context, kind: Kind) -> Generator:
    """A trained baseline of the model's data."""
    return load_baseline(kind, source(context, kind), context.workshop.device)


def about(context: Context) -> Doc:
    """Which baselines there are: what training wrote of each, or its name; None if there is none."""
    found: Doc = {}
    for kind in BASELINES:
        try:
            place = source(context, kind)
        except Missing:
            found[kind] = None
            continue
        written = Path(place) / ABOUT
        found[kind] = parse_json(read_text(written)) if written.is_file() else str(place)
    return {"baselines": found}


def needs(context: Context) -> None:
    """Every baseline; the flow's own row needs none."""
    lacking = [BASELINES[kind] for kind, found in about(context)["baselines"].items() if found is None]
    if lacking:
        raise Lacking(f"no weights of {' and '.join(lacking)}")


def run(context: Context) -> Result:
    """Seconds a batch and FID of each, by the same rules; and of shuffled pixels, the floor."""
    shop, scale, model = context.workshop, context.scale, context.model
    n, batch = shop.wanted(model), scale.batches[-1]
    known = real(shop, model, n)
    plan = shop.plan(model, FLOW, batch, tau=TAU)
    seen = look(shop, model, plan, n, context.seed).moments
    rows: list[dict[str, Any]] = [
        {
            "method": f"flow, {FLOW}",
            "seconds": seconds(context, lambda start: one_batch(context, plan, batch, start), batch),
            "fid": fid_of(known, seen).value,
            "kid": kid(known, seen).value,
            "samples": seen.count,
            "parameters": sum(p.numel() for p in context.flow.parameters()),
            "minutes": 60 * MODELS[model].hours,
        }
    ]
    shown = {f"flow, {FLOW}": shop.draw(model, plan, 24)}
    for kind, label in BASELINES.items():
        try:
            generator = baseline(context, kind)
        except (Missing, BaselineError) as error:
            rows.append({"method": label, "missing": str(error)})
            continue
        rows.append({"method": label} | size(context, kind, generator))
        rows[-1] |= measure(context, generator, n, batch)
        shown[label] = as_pixels(generator.sample(24, seed=context.seed))
    if found := [row for row in rows[1:] if "fid" in row]:
        floor = {"method": SHUFFLED} | shuffled(context, n)
        for row in found:
            row["counts"] = counts(row, floor)
        rows.append(floor)
    path = context.picture("generators")
    drawing.grids(path, shown, columns=8, across=len(shown))
    return Result(
        data={"rows": rows, "tau": TAU},
        counts={"samples": n, "real_images": known.count, "batch": batch, "timed_batches": scale.repeats},
        seeds={"noise": context.seed},
        pictures=(Picture(path.name, f"{model}: samples of each.", context.restricted),),
    )


def size(context: Context, kind: Kind, generator: Generator) -> Doc:
    """Parameters that sampling uses, and minutes of training, where they are known."""
    nets = [part for part in vars(generator).values() if isinstance(part, torch.nn.Module)]
    about_it = about(context)["baselines"][kind]
    spent = about_it.get("seconds") if isinstance(about_it, dict) else None
    return {
        "parameters": sum(p.numel() for net in nets for p in net.parameters()) or None,
        "minutes": None if spent is None else spent / 60,
    }


def one_batch(context: Context, plan: Plan, batch: int, start: int) -> Tensor:
    """What of the flow is timed: the noise, decoding and denoising of one batch, without guidance."""
    flow, labels = context.flow, context.labels(batch, start)
    x = flow.decode(flow.noise(batch, context.seed, start=start), plan, labels=labels).x
    return context.workshop.clean(context.model, x, labels)


def seconds(context: Context, draw: Callable[[int], Tensor], batch: int) -> float:
    """The mean of several batches, after one that pays for what is made at first use."""
    device, found = context.workshop.device, []
    for i in range(context.scale.repeats + 1):
        began = time.perf_counter()
        draw(i * batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.fmean(found[1:])


def measure(context: Context, generator: Generator, n: int, batch: int) -> dict[str, Any]:
    """A baseline, as the flow is measured."""

    def draw(start: int, count: int) -> Tensor:
        return generator.sample(count, seed=context.seed, start=start)

    return {"seconds": seconds(context, lambda start: draw(start, batch), batch)} | judged(context, draw, n)


def shuffled(context: Context, n: int) -> dict[str, Any]:
    """Test images whose pixels change places: the same colours, no picture."""
    test = context.workshop.images(context.model)[1].pixels
    draw = torch.Generator().manual_seed(context.seed)
    pixels = shuffle_pixels(test[torch.randint(len(test), (n,), generator=draw)], context.seed)
    pixels = pixels.to(context.workshop.device)
    return judged(context, lambda start, count: pixels[start : start + count], n)


def judged(context: Context, draw: Draw, n: int) -> dict[str, Any]:
    """FID and KID of n pictures, against the images that the flow's samples are compared with."""
    device = context.workshop.device
    found = evaluate_pictures(
        draw,
        context.workshop.images(context.model)[0],
        samples=n,
        seed=context.seed,
        batch=AT_ONCE,
        network=load_inception(device),
        device=device,
    )
    assert found.fid is not None
    assert found.kid is not None
    return {"fid": found.fid.value, "kid": found.kid.value, "samples": n}


def tables(docs: Docs) -> list[Table]:
    """Seconds and FID."""
    head = (
        "model",
        "method",
        "parameters",
        "trained, min",
        "seconds a batch",
        "FID ↓",
        "KID ↓",
        "samples",
        "counts as a baseline",
    )
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, row in enumerate(docs[model]["data"]["rows"]):
            at = f"rows/{i}"
            cells: tuple[Cell, ...] = (
                Figure(model, f"{at}/parameters", "{:,}"),
                Figure(model, f"{at}/minutes", "{:.0f}"),
                Figure(model, f"{at}/seconds", "{:.3f}"),
                Figure(model, f"{at}/fid"),
                Figure(model, f"{at}/kid", "{:.4f}"),
                Figure(model, f"{at}/samples", "{:,}"),
                {True: "yes", False: "no", None: ""}[row.get("counts")],
            )
            if "missing" in row:
                cells = (Figure(model, f"{at}/missing"), "", "", "", "", "", "")
            rows.append((model if i == 0 else "", row["method"], *cells))
    note = (
        "Seconds of a batch, the flow's with noise and denoising. The GAN (skip-layer excitation, "
        "self-supervised discriminator) and the diffusion model are small networks, trained here for as long "
        f"as the flow; the paper took the official FastGAN and google/ddpm-cifar10-32. {BIASED} A baseline "
        f"counts if FID and KID are below {CLEARLY:g} of those of shuffled pixels."
    )
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


ITEM = Item(
    name="generators",
    title="Beside a GAN and a diffusion model",
    shows="Table A6",
    models=lambda scale: scale.generators,
    run=run,
    tables=tables,
    theirs=(paper_figures.generators(),),
    settings=about,
    needs=needs,
    minutes=lambda scale, model: 5.0,
)
