"""Masked dependencies: generations (Figure 2), and how far blocks are from standard (Figures 1 and A1)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from jacobiflow.core.pictures import as_images
from jacobiflow_lab.analysis.plots import save_masked, save_redundancy
from jacobiflow_lab.analysis.redundancy import Masked, Redundancy, redundancy
from jacobiflow_lab.metrics import as_pixels, features, load_inception, paired_distance
from jacobiflow_lab.metrics.samples import pictures
from jacobiflow_lab.paper.schema import Doc, Item, Result
from jacobiflow_lab.paper.session import Task

SHOWN = 10  # samples in a picture


def run(task: Task) -> Result:
    """Cosine similarity and L2 distance of each block, and pictures, with the o nearest positions masked."""
    n = task.scale.analysed
    z = task.flow.noise(n, task.seed)
    found = redundancy(task.flow, z, offsets=task.scale.offsets, labels=task.labels(n))
    draw = partial(save_redundancy, found, title=f"{task.model}: masked against standard inference")
    caption = (
        f"{task.model}: each block by itself, with exact input; a high similarity and a low distance mean "
        "redundancy. Above, the keys of the o nearest predecessors are dropped from the attention; below, no "
        "information from them gets through."
    )
    drawn, rows = [task.picture("redundancy", caption, draw)], list[Doc]()
    if as_images(found.exact) is not None:
        cleaned = clean(task, found)
        for variant in dict.fromkeys(m.variant for m in found.masked):
            title = f"{task.model}: the o nearest predecessors masked ({variant})"
            masked = partial(save_masked, cleaned, variant=variant, title=title, shown=SHOWN)
            options = {"restricted": task.restricted, "section": "masked"}
            drawn.append(task.picture(f"masked-{variant}", title + ".", masked, **options))
        rows = distances(task, cleaned) if task.session.features else []
    data = found.to_dict() | {"rows": rows, "deviation": first_beside_others(found.masked)}
    return Result(data=data, counts={"samples": n, "shown": min(SHOWN, n)}, pictures=tuple(drawn))


def first_beside_others(masked: tuple[Masked, ...]) -> Doc | None:
    """The first block beside the most affected of the others, attention masked at the largest o."""
    first, *others = [m for m in masked if m.variant == masked[0].variant][-1].layers
    if not others:
        return None
    far = max(others, key=lambda layer: layer.l2)
    return {
        "first_l2": first.l2,
        "other_l2": far.l2,
        "first_cosine": first.cosine,
        "other_cosine": min(layer.cosine for layer in others),
        "error": (first.l2_error**2 + far.l2_error**2) ** 0.5,
    }


def clean(task: Task, found: Redundancy) -> Redundancy:
    """The same with denoised pictures, black where they are not finite."""
    labels = task.labels(found.samples)
    exact, *masked = (
        pictures(task.flow, x.nan_to_num(-1.0).clamp(-2, 2), labels)
        for x in (found.exact, *(m.x for m in found.masked))
    )
    every = zip(found.masked, masked, strict=True)
    return replace(found, exact=exact, masked=tuple(replace(m, x=x) for m, x in every))


def distances(task: Task, cleaned: Redundancy) -> list[Doc]:
    """How far the masked pictures are from the standard ones, with the standard error over samples."""
    network = load_inception(task.device)
    exact = features(as_pixels(cleaned.exact), network)
    rows = []
    for m in cleaned.masked:
        paired = paired_distance(features(as_pixels(m.x), network), exact)
        relative = {"paired_relative": paired.relative, "paired_error": paired.error / paired.spread}
        rows.append({"variant": m.variant, "o": m.o, "lost": m.along[-1].lost} | relative)
    return rows


ITEM = Item(name="similarity", run=run, minutes=lambda scale, model: 0.6)
