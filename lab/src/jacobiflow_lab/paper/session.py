"""One run of `reproduce`: its settings and what its items share; and a task, one item on one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from jacobiflow.core.method import Init, Plan
from jacobiflow.data.decoding import Images
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.jobs.manifest import fingerprint
from jacobiflow.jobs.sampling import labels_in_turn
from jacobiflow_lab.paper.assets import load_data, load_flow, training_run
from jacobiflow_lab.paper.models import MODELS, Model, Scale
from jacobiflow_lab.paper.schema import Picture

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
    labels: tuple[int, ...] | None = None  # that samples take in turn; None: all classes of the model
    features: bool = True  # whether Inception features are computed where an item can do without
    train: Callable[[Model, Path], None] | None = None  # trains a missing model
    train_baseline: Callable[[Any, Model, Path], None] | None = None  # of a kind, for a model's data
    note: Callable[[str], None] = lambda text: None
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)  # the JSON so far, by item and model
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
        return Guidance(weight=self.guidance, annealed=bool(self.guidance))


class Task:
    """One item on one model: the session, the model, and the folder for pictures.

    flow, run: the model and the folder of its training run, where they are not looked for by name. prefix: of
    the files of pictures.
    """

    def __init__(
        self,
        session: Session,
        model: str,
        folder: Path,
        *,
        flow: Flow | None = None,
        run: Path | None = None,
        prefix: str | None = None,
    ) -> None:
        self.session, self.model, self.folder = session, model, folder
        self.scale, self.seed, self.device = session.scale, session.seed, session.device
        self.restricted = model in MODELS and MODELS[model].restricted
        self.judged = model in self.scale.judged
        self._flow, self._run = flow, run
        self._prefix = f"{model}-" if prefix is None else prefix

    @property
    def flow(self) -> Flow:
        """The model."""
        return self._flow or self.session.once(("flow", self.model), lambda: load_flow(self.session, self.model))

    @property
    def training_run(self) -> Path:
        """The folder of the model's training run, with the checkpoints that it kept."""
        return self._run or training_run(self.session, self.model)

    @property
    def images(self) -> tuple[Images, Images]:
        """Training and test images in the model's own shape."""
        model = MODELS[self.model]
        return self.session.once(("images", self.model), lambda: load_data(self.session, model, self.flow))

    def plan(self, name: str, init: Init | None = None) -> Plan:
        """A named plan at the scale's tau, from the paper's first guess or another one."""
        tau = self.flow.default_tol if self.scale.tau is None else self.scale.tau
        return self.flow.plan(name, tol=tau, init=init or self.scale.inits[0])

    def labels(self, n: int, classes: int | None = None) -> Tensor | None:
        """The labels of n samples of the model, or of a flow with so many classes; None for an unconditional one."""
        known = range(self.flow.num_classes if classes is None else classes)
        labels = labels_in_turn(known if self.session.labels is None else self.session.labels, range(n))
        return None if labels is None else labels.to(self.device)

    def samples(self) -> int:
        """Samples scored per method: --samples, else the scale's, else as many as there are images."""
        most = (self.scale.samples or len(self.images[0])) if self.judged else self.scale.small
        return self.session.samples or most

    def few_samples(self) -> int:
        """Samples scored where a method is one of many: --samples, else the scale's."""
        return self.session.samples or min(self.scale.few or self.samples(), self.samples())

    def picture(self, name: str, caption: str, draw: Callable[[Path], object], **options: Any) -> Picture:
        """A picture of this item and model, drawn into its file. options: those of `Picture`."""
        path = self.folder / f"{self._prefix}{name}.png"
        draw(path)
        return Picture(path.name, caption, **options)

    def weights(self) -> str:
        """The digest of the model's weights."""
        return fingerprint(self.flow)
