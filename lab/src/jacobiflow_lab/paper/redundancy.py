"""Masked dependencies: generations (Figure 2), and how far blocks are from standard (Figures 1 and A1)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from jacobiflow_lab.analysis.plots import save_masked, save_redundancy
from jacobiflow_lab.analysis.redundancy import Redundancy, redundancy
from jacobiflow_lab.metrics import as_pixels, features, load_inception, paired_distance
from jacobiflow_lab.paper.sampling import denoise
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import Column, Table

SHOWN = 10  # samples in a picture


def analyse(task: Task) -> Redundancy:
    """All variants and offsets, once for both items."""
    n = task.scale.analysed

    def make() -> Redundancy:
        return redundancy(task.flow, task.flow.noise(n, task.seed), **task.condition(n))

    return task.session.once(("redundancy", task.model, n, task.seed), make)


def run_generations(task: Task) -> Result:
    """Pictures with the o nearest predecessors masked in every block, and their distance from standard."""
    found, labels = analyse(task), task.labels(task.scale.analysed)
    network = load_inception(task.device)

    def clean(x: Tensor) -> Tensor:
        return denoise(task, x.nan_to_num(-1.0).clamp(-2, 2), labels)

    standard = clean(found.exact)
    masked = [clean(m.x) for m in found.masked]
    cleaned = replace(
        found,
        exact=standard[:SHOWN],
        masked=tuple(replace(m, x=x[:SHOWN]) for m, x in zip(found.masked, masked, strict=True)),
    )
    pictures = []
    for variant in dict.fromkeys(m.variant for m in found.masked):
        path = task.picture(variant)
        title = f"{task.model}: the o nearest predecessors masked ({variant})"
        save_masked(cleaned, path, variant=variant, title=title, shown=SHOWN)
        pictures.append(Picture(path.name, title + ".", task.restricted))
    exact = features(as_pixels(standard), network)
    rows = [
        {
            "variant": m.variant,
            "o": m.o,
            "lost": m.along[-1].lost,
            "paired_relative": paired_distance(features(as_pixels(x), network), exact).relative,
        }
        for m, x in zip(found.masked, masked, strict=True)
    ]
    return Result(
        data={"rows": rows},
        counts={"shown": min(SHOWN, found.samples), "compared": found.samples},
        pictures=tuple(pictures),
    )


def run_similarity(task: Task) -> Result:
    """Cosine similarity and L2 distance of each block."""
    found = analyse(task)
    path = task.picture("similarity")
    save_redundancy(found, path, title=f"{task.model}: masked against standard inference")
    caption = (
        f"{task.model}: each block by itself, with exact input. Above, the keys of the o nearest "
        "predecessors are dropped from the attention; below, no information from them gets through."
    )
    return Result(
        data=found.to_dict(),
        counts={"samples": found.samples},
        pictures=(Picture(path.name, caption),),
    )


MASKED = Table(
    rows="rows",
    columns=(
        Column("variant", "{variant}"),
        Column("o", "{o}"),
        Column("paired distance", "{paired_relative:.2f}", better="lower"),
        Column("samples that overflowed", "{lost}"),
    ),
    note="Paired distance: of Inception features from the picture of the same noise with nothing masked, "
    "divided by the mean distance between different pictures. At 1 nothing of the picture is left.",
)
SIMILARITY_TABLE = Table(
    rows="masked",
    columns=(
        Column("variant", "{variant}"),
        Column("o", "{o}"),
        Column("block *", "{layers/*/cosine:.3f} / {layers/*/l2:.2f}", over="layers", empty=""),
    ),
    note="Cosine similarity / L2 distance of the block's output from the standard output, its input exact. "
    "With all blocks up to it masked: `along` in the JSON.",
)

GENERATIONS = Item(
    name="masked",
    run=run_generations,
    tables=(MASKED,),
    minutes=lambda scale, model: 0.5,
)
SIMILARITY = Item(
    name="similarity",
    run=run_similarity,
    tables=(SIMILARITY_TABLE,),
    minutes=lambda scale, model: 0.1,
)
