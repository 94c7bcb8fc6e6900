"""The configurations (the paper's Table A2) and its notation (Table A1)."""

from __future__ import annotations

from dataclasses import asdict

from jacobiflow.flows.tarflow import TarFlow
from jacobiflow_lab.paper.models import MODELS
from jacobiflow_lab.paper.schema import Item, Result
from jacobiflow_lab.paper.session import Task
from jacobiflow_lab.paper.tables import Column, Table


def run(task: Task) -> Result:
    """The model's own configuration."""
    flow = task.flow
    assert isinstance(flow, TarFlow)
    count = sum(p.numel() for p in flow.parameters())
    config = asdict(flow.config) | {"positions": flow.latent_shape[0], "parameters": count}
    return Result(data=config | {"recipe": MODELS[task.model].recipe}, counts={"models": 1})


CONFIGURATION = Table(
    title="Our models",
    columns=(
        Column("resolution", "{image_size:,}"),
        Column("patch size", "{patch_size:,}"),
        Column("positions", "{positions:,}"),
        Column("blocks", "{blocks:,}"),
        Column("layers per block", "{layers_per_block:,}"),
        Column("width", "{width:,}"),
        Column("classes", "{num_classes:,}"),
        Column("noise in training", "{noise_std:g}"),
        Column("parameters", "{parameters:,}"),
    ),
)

ITEM = Item(
    name="configuration",
    run=run,
    noise=False,
    tables=(CONFIGURATION,),
    minutes=lambda scale, model: 0.02,
)
