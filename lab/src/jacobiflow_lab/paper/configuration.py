"""The configurations (the paper's Table A2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from jacobiflow.flows.tarflow import TarFlow
from jacobiflow_lab.paper import paper_figures
from jacobiflow_lab.paper.item import Cell, Docs, Figure, Item, Result, Table, missing_rows, present
from jacobiflow_lab.paper.models import MODELS
from jacobiflow_lab.paper.workshop import Context

FIELDS = (
    ("resolution", "image_size"),
    ("patch size", "patch_size"),
    ("positions", "positions"),
    ("blocks", "blocks"),
    ("layers a block", "layers_per_block"),
    ("width", "width"),
    ("classes", "num_classes"),
    ("noise of training", "noise_std"),
    ("parameters", "parameters"),
)


def run(context: Context) -> Result:
    """The model's own configuration."""
    flow = context.flow
    assert isinstance(flow, TarFlow)
    count = sum(p.numel() for p in flow.parameters())
    config = asdict(flow.config) | {"positions": flow.latent_shape[0], "parameters": count}
    return Result(data=config | {"recipe": MODELS[context.model].recipe}, counts={"models": 1})


def tables(docs: Docs) -> list[Table]:
    """Our models, a column each."""
    there = present(docs)
    rows: list[Sequence[Cell]] = [
        (label, *(Figure(m, key, "{:g}" if key == "noise_std" else "{:,}") for m in there))
        for label, key in FIELDS
    ]
    head = ("", *(there or ("",)))
    return [Table(title="Our models", head=head, rows=[*rows, *missing_rows(docs, len(head))])]


ITEM = Item(
    name="configuration",
    title="Configurations and notation",
    shows="Tables A1 and A2",
    models=lambda scale: scale.images,
    run=run,
    tables=tables,
    theirs=(paper_figures.configuration(), paper_figures.notation()),
    minutes=lambda scale, model: 0.02,
)
