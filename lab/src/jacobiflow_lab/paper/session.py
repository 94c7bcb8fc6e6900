"""One run of `reproduce`: its settings and what its items share; and a task, one item on one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from jacobiflow.data.sources import Images
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.weights import digest
from jacobiflow_lab.paper.assets import load_data, load_flow
from jacobiflow_lab.paper.models import MODELS, Model, Scale

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class Session:
    """The settings of one run, and a cache of what several items use."""

    scale: Scale
    out: Path
    data_dir: Path | None = None
    models_dirs: tuple[Path, ...] = ()
    records: Path | None = None  # a published report, whose rows are used where weights are missing
    ddim: str = ""  # diffusers weights of the diffusion model, instead of one trained here
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    samples: int | None = None  # overrides the scale's
    clip: str = ""  # a CLIP model of transformers; "": none
    guidance: float = 0.0  # annealed, for samples that are scored and shown; never timed
    train: Callable[[Model, Path], None] | None = None  # trains a missing model
    train_baseline: Callable[[Any, Model, Path], None] | None = None  # of a kind, for a model's data
    note: Callable[[str], None] = lambda text: None
    _cache: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """make(), called the first time that this key is used."""
        if key not in self._cache:
            self._cache[key] = make()
        value: T = self._cache[key]
        return value

    @property
    def annealed_guidance(self) -> Guidance:
        """Of samples that are scored and shown."""
        return Guidance(weight=self.guidance, annealed=True)

    def at_most(self, n: int, limit: int | None) -> int:
        """n, or the scale's limit if that is lower; --samples lifts the limit."""
        return n if self.samples or limit is None else min(n, limit)


class Task:
    """One item on one model: the session, the model, and the folder for pictures."""

    def __init__(self, session: Session, model: str, folder: Path) -> None:
        self.session, self.model, self.folder = session, model, folder
        self.scale, self.seed, self.device = session.scale, session.seed, session.device
        self.restricted = MODELS[model].restricted  # pictures may not be redistributed

    @property
    def flow(self) -> Flow:
        """The model."""
        return self.session.once(("flow", self.model), lambda: load_flow(self.session, self.model))

    @property
    def images(self) -> tuple[Images, Images]:
        """Training and test images in the model's own shape."""
        model = MODELS[self.model]
        return self.session.once(("images", self.model), lambda: load_data(self.session, model, self.flow))

    def labels(self, n: int, start: int = 0) -> Tensor | None:
        """All classes in turn; None for an unconditional model."""
        classes = self.flow.num_classes
        return torch.arange(start, start + n, device=self.device) % classes if classes else None

    def condition(self, n: int) -> dict[str, Any]:
        """The labels of n samples as keyword arguments of `Flow.decode`."""
        labels = self.labels(n)
        return {} if labels is None else {"labels": labels}

    def samples(self) -> int:
        """Samples scored per method: --samples, else the scale's, else as many as there are images."""
        return self.session.samples or self.scale.samples or len(self.images[0])

    def few_samples(self) -> int:
        """Samples scored where a method is one of many: --samples, else the scale's."""
        return self.samples() if self.session.samples or self.scale.few is None else self.scale.few

    def picture(self, name: str) -> Path:
        """The path of a picture of this item and model."""
        return self.folder / f"{self.model}-{name}.png"

    def weights(self) -> str:
        """The digest of the model's weights."""
        return digest(self.flow.state_dict(), self.flow.family, repr(self.flow.config))
