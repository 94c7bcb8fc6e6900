"""`jf.models()`: what the bundled models are, from their checkpoints and model cards."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from textwrap import fill
from typing import Any

import torch

from jacobiflow.core.tables import pip_install, table
from jacobiflow.flows.checkpoint import CARD, MODELS, CheckpointError, bundled_names, load

HEAD = ("model", "family", "data", "T", "classes", "size", "quality")


@dataclass(frozen=True, kw_only=True)
class Bundled:
    """One bundled model. `problem` says why it cannot be loaded; the other fields are then empty."""

    name: str
    family: str = ""
    data: str = ""
    length: int = 0  # positions, T
    classes: int = 0  # 0: it takes no labels
    parameters: int = 0
    quality: str = ""
    backend: str = ""  # on this machine, unless one is asked for
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    problem: str = ""


class Models(tuple[Bundled, ...]):
    """The bundled models; prints as a table."""

    def __repr__(self) -> str:
        rows = [
            (m.name, m.family, m.data, str(m.length), str(m.classes), f"{m.parameters / 1e6:.2g}M", m.quality)
            for m in self
            if not m.problem
        ]
        shown = table([HEAD, *rows]) if rows else f"no models are installed: {pip_install('models')}"
        problems = (f"{m.name} cannot be loaded: {m.problem}" for m in self if m.problem)
        return "\n".join([shown, *(fill(text, 80, break_on_hyphens=False) for text in problems)])


def models() -> Models:
    """The models that `jf.load` knows by name: data set, positions T, classes, parameters, quality.

    >>> [m.name for m in models() if m.data == "mnist"]
    ['mnist', 'mnist-maf', 'mnist-small']
    """
    return Models(_describe(name) for name in bundled_names())


def _describe(name: str) -> Bundled:
    try:
        flow = load(name)
    except CheckpointError as error:  # its family is not installed
        return Bundled(name=name, problem=str(error).replace(f"{files(MODELS) / name}/", ""))
    context = torch.zeros(flow.context_features) if flow.context_features else None
    with torch.inference_mode():
        engines = {block.engine.name for block in flow.bound_blocks(1, context=context)}
    card = (files(MODELS) / name / CARD).read_text(encoding="utf-8")
    header = dict(re.findall(r"^(\w+): (.*)$", card.partition("\n---\n")[0], re.MULTILINE))
    return Bundled(
        name=name,
        family=flow.family,
        data=header.get("datasets", "").strip("[]"),
        length=flow.sequence_shape[0],
        classes=flow.num_classes,
        parameters=sum(p.numel() for p in flow.parameters()),
        quality=header.get("quality", ""),
        backend=" + ".join(sorted(engines)),
        config=asdict(flow.config),
    )
