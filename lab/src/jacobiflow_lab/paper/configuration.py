"""The configurations (the paper's Table A2) and its notation (Table A1)."""

from __future__ import annotations

from dataclasses import asdict

from jacobiflow.flows.tarflow import TarFlow
from jacobiflow_lab.paper.models import MODELS
from jacobiflow_lab.paper.schema import Item, Result
from jacobiflow_lab.paper.session import Task


def run(task: Task) -> Result:
    """The model's own configuration."""
    flow = task.flow
    assert isinstance(flow, TarFlow)
    count = sum(p.numel() for p in flow.parameters())
    config = asdict(flow.config) | {"positions": flow.latent_shape[0], "parameters": count}
    return Result(
        data=config | {"recipe": MODELS[task.model].recipe, "size": "small" if MODELS[task.model].small else "main"},
        counts={"models": 1},
    )


ITEM = Item(name="configuration", run=run, noise=False, minutes=lambda scale, model: 0.02)
