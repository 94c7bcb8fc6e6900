"""Masked dependencies: generations (Figure 2), and how far layers are from standard (Figures 1 and A1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from jacobiflow_lab.analysis.plots import save_masked, save_redundancy
from jacobiflow_lab.analysis.redundancy import Redundancy, redundancy
from jacobiflow_lab.metrics import as_pixels, features, load_inception, paired_distance
from jacobiflow_lab.paper.item import Cell, Docs, Figure, Item, Picture, Result, Table, missing_rows, present
from jacobiflow_lab.paper.workshop import Context

SHOWN = 10


def analyse(context: Context) -> Redundancy:
    """All variants and offsets, once for both items."""
    shop, n = context.workshop, context.scale.analysed

    def make() -> Redundancy:
        return redundancy(context.flow, context.flow.noise(n, context.seed), **context.condition(n))

    return shop.once(("redundancy", context.model, n, context.seed), make)


def run_generations(context: Context) -> Result:
    """Pictures with the o nearest predecessors masked in every layer, denoised as other samples are."""
    found, labels = analyse(context), context.labels(context.scale.analysed)

    def clean(x: Tensor) -> Tensor:
        shown = x[:SHOWN].nan_to_num(-1.0).clamp(-2, 2)
        return context.workshop.clean(context.model, shown, None if labels is None else labels[:SHOWN])

    cleaned = replace(
        found, exact=clean(found.exact), masked=tuple(replace(m, x=clean(m.x)) for m in found.masked)
    )
    pictures = []
    for variant in dict.fromkeys(m.variant for m in found.masked):
        path = context.picture(variant)
        title = f"{context.model}: the o nearest predecessors masked ({variant})"
        save_masked(cleaned, path, variant=variant, title=title, shown=SHOWN)
        pictures.append(Picture(path.name, title + ".", context.restricted))
    changed = changes(context, found, labels)
    rows = [
        {"variant": m.variant, "o": m.o, "lost": m.along[-1].lost, "paired_relative": far}
        for m, far in zip(found.masked, changed, strict=True)
    ]
    return Result(
        data={"rows": rows},
        counts={"shown": min(SHOWN, found.samples), "compared": found.samples},
        seeds={"noise": context.seed},
        pictures=tuple(pictures),
    )


def changes(context: Context, found: Redundancy, labels: Tensor | None) -> list[float]:
    """How far masked generations are from the standard ones: Inception features, paired by their noise."""
    shop, network = context.workshop, load_inception(context.workshop.device)

    def look(x: Tensor) -> Tensor:
        clean = shop.clean(context.model, x.nan_to_num(-1.0).clamp(-2, 2), labels)
        return features(as_pixels(clean), network)

    exact = look(found.exact)
    return [paired_distance(look(m.x), exact).relative for m in found.masked]


def run_similarity(context: Context) -> Result:
    """Cosine similarity and L2 distance of each layer."""
    found = analyse(context)
    path = context.picture("similarity")
    save_redundancy(found, path, title=f"{context.model}: masked against standard inference")
    return Result(
        data=found.to_dict(),
        counts={"samples": found.samples},
        seeds={"noise": context.seed},
        pictures=(
            Picture(
                path.name,
                f"{context.model}: each layer by itself, its input exact. Above, the keys of the o nearest "
                "predecessors are dropped from the attention; below, nothing of them gets through.",
            ),
        ),
    )


def generation_tables(docs: Docs) -> list[Table]:
    """How far the pictures are from the standard ones."""
    head = ("model", "variant", "o", "paired distance ↓", "samples that overflowed")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, _ in enumerate(docs[model]["data"]["rows"]):
            at = f"rows/{i}"
            rows.append(
                (
                    model if i == 0 else "",
                    Figure(model, f"{at}/variant"),
                    Figure(model, f"{at}/o", "{}"),
                    Figure(model, f"{at}/paired_relative"),
                    Figure(model, f"{at}/lost", "{}"),
                )
            )
    note = (
        "Paired distance: of Inception features to the picture of the same noise with nothing masked, in "
        "units of the mean distance between different pictures. At 1 a picture has nothing left of its own."
    )
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


def similarity_tables(docs: Docs) -> list[Table]:
    """A row for each model, variant and o; a column for each layer."""
    there = present(docs)
    most = max((len(docs[m]["data"]["masked"][0]["layers"]) for m in there), default=1)
    head = ("model", "variant", "o", *(f"layer {k + 1}" for k in range(most)))
    rows: list[Sequence[Cell]] = []
    for model in there:
        for i, masked in enumerate(docs[model]["data"]["masked"]):
            cells: list[Cell] = []
            for k in range(most):
                at = f"masked/{i}/layers/{k}"
                there_is = k < len(masked["layers"])
                cells.append(
                    (Figure(model, f"{at}/cosine", "{:.3f}"), " / ", Figure(model, f"{at}/l2", "{:.2f}"))
                    if there_is
                    else ""
                )
            rows.append(
                (
                    model if i == 0 else "",
                    Figure(model, f"masked/{i}/variant"),
                    Figure(model, f"masked/{i}/o", "{}"),
                    *cells,
                )
            )
    note = (
        "Cosine similarity / L2 distance to the layer's standard output, its input exact. With all layers "
        "up to it masked: `along` in the JSON."
    )
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


GENERATIONS = Item(
    name="masked",
    title="Generations with masked dependencies",
    shows="Figure 2",
    models=lambda scale: scale.images,
    run=run_generations,
    tables=generation_tables,
    words=(
        "Grids of CIFAR-10 and AFHQ, standard and with o = 1, 2, 5: quality falls with o, pictures still "
        "mean something."
    ),
    minutes=lambda scale, model: 0.5,
)
SIMILARITY = Item(
    name="similarity",
    title="Redundancy of layers",
    shows="Figures 1 and A1",
    models=lambda scale: scale.images,
    run=run_similarity,
    tables=similarity_tables,
    words=(
        "Cosine similarity and L2 distance of each layer for o = 1, 2, 5, CIFAR-100 and AFHQ: the first "
        "layer deviates far more than the others. The plots have no numbers."
    ),
    minutes=lambda scale, model: 0.1,
)
