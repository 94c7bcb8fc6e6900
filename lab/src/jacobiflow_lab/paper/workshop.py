"""What the items of one run share: models, data, plans and samples, each made once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from jacobiflow.core.plan import Plan
from jacobiflow.core.types import JacobiflowError, Method
from jacobiflow.data.pictures import as_images
from jacobiflow.data.sources import Images, load_images
from jacobiflow.flows.checkpoint import CONFIG, bundled_names, load
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.maf import MAF
from jacobiflow.flows.weights import digest
from jacobiflow.training.recipe import Recipe
from jacobiflow_lab.analysis.progress import kept
from jacobiflow_lab.metrics import as_pixels
from jacobiflow_lab.paper.item import Missing
from jacobiflow_lab.paper.models import MODELS, Model, Scale

T = TypeVar("T")
PREVIOUS = "selective, from input"  # the first guess is the layer's input, which is our default
METHODS = ("sequential", "uniform", "selective", PREVIOUS, "windowed", "auto")
TAU = 0.5  # the paper's
WINDOW = Method(width=16, tol=0.01)  # of the windowed plan's first block; looser ones add errors up
AT_ONCE = 64  # samples decoded and denoised at a time, where nothing is timed


@dataclass(eq=False, kw_only=True)
class Workshop:
    """Where things are, and what has been made of them. Anything that is not there raises Missing."""

    scale: Scale
    out: Path
    data_dir: Path
    models_dirs: tuple[Path, ...] = ()
    records: Path | None = None  # a published report, whose rows stand where weights are missing
    ddim: str = ""  # diffusers weights of the diffusion model, in place of one trained here
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0
    samples: int | None = None  # in place of the scale's
    clip: str = ""  # a transformers CLIP; "" is none
    guidance: float = 0.0  # annealed, of samples that are judged and shown; times are without
    train: Callable[[Model, Path], None] | None = None  # trains what is missing
    train_baseline: Callable[[Any, Model, Path], None] | None = None  # of a kind, for a model's data
    note: Callable[[str], None] = lambda text: None
    _flows: dict[str, Flow] = field(default_factory=dict)
    _images: dict[str, tuple[Images, Images]] = field(default_factory=dict)
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """make() of the first call with this key, for all of them."""
        if key not in self._made:
            self._made[key] = make()
        found: T = self._made[key]
        return found

    # Models

    def folder(self, name: str) -> Path | None:
        """The run or checkpoint folder of a model under --models-dir, if there is one."""
        for base in (*self.models_dirs, self.out / "trained"):
            for path in (base / name / "model", base / name):
                if (path / CONFIG).is_file():
                    return path
        return None

    def flow(self, name: str) -> Flow:
        """The model of that name: a trained folder, else the bundled one."""
        if name not in self._flows:
            found = self.folder(name)
            if found is None and name not in bundled_names():
                found = self._trained(MODELS[name])
            self._flows[name] = load(found or name, device=self.device)
        return self._flows[name]

    def _trained(self, model: Model) -> Path:
        if self.train is None:
            public = ", or convert a public checkpoint" if self.scale.name == "paper" else ""
            raise Missing(
                f"no weights of {model.name}: train it with `{self.order(model)}` "
                f"(about {model.hours:g} h){public} and give --models-dir models, "
                "or add --train-missing"
            )
        run = self.out / "trained" / model.name
        self.note(f"training {model.name} by its recipe, about {model.hours:g} h")
        self.train(model, run)
        return run / "model"

    def order(self, model: Model) -> str:
        """The command that trains a model, on the data that are here."""
        source = Recipe.load(model.recipe).data.source
        local = f" --data.source {self.data_dir / source}" if source.endswith(".npz") else ""
        return f"jacobiflow train {model.recipe}{local} --out models/{model.name}"

    def run_of(self, name: str) -> Path:
        """The folder of the training run of a model, with the checkpoints that it kept."""
        found = self.folder(name)
        run = found.parent if found is not None and found.name == "model" else found
        if run is None or not kept(run):
            raise Missing(
                f"no checkpoints that training of {name} kept: train it with `{self.order(MODELS[name])}` "
                "and give --models-dir models"
            )
        return run

    # Data

    def images(self, name: str) -> tuple[Images, Images]:
        """Training and test images in the model's own shape."""
        if name not in self._images:
            flow, recipe = self.flow(name), Recipe.load(MODELS[name].recipe)
            shape = self.shape(name)
            source = recipe.data.source
            if (self.data_dir / source).exists():
                source = str(self.data_dir / source)
            elif source.endswith(".npz"):
                raise Missing(f"no data: {source} is not in {self.data_dir}, give --data-dir")
            try:
                self._images[name] = load_images(
                    replace(recipe.data, source=source),
                    image_size=shape[1],
                    channels=shape[0],
                    num_classes=flow.num_classes,
                )
            except JacobiflowError as error:
                raise Missing(f"no data: {error}") from None
        return self._images[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Channels, height and width of the model's pictures."""
        flow = self.flow(name)
        if isinstance(flow, MAF):
            side = math.isqrt(flow.config.features)
            return (1, side, side)
        return flow.data_shape

    def labels(self, name: str, n: int, start: int = 0) -> Tensor | None:
        """All classes in turn; None for a model without labels."""
        classes = self.flow(name).num_classes
        return torch.arange(start, start + n, device=self.device) % classes if classes else None

    # Plans and samples

    def plan(self, name: str, method: str, batch: int, *, tau: float | None = None) -> Plan:
        """One of METHODS for a model; auto is tuned for this machine and batch, once.

        Uniform and selective start from zeros, as the paper's algorithm does; windowed and auto as ours do.
        """
        flow = self.flow(name)
        if method == "windowed":
            return Plan((WINDOW, *flow.plan("selective", tol=tau).methods[1:]))
        if method == "auto":
            return flow.plan("auto", n=batch, labels=self.labels(name, batch))
        if method == PREVIOUS:
            return flow.plan("selective", tol=tau, init="previous")
        return flow.plan("sequential") if method == "sequential" else flow.plan(method, tol=tau, init="zeros")

    def draw(self, name: str, plan: Plan, n: int, *, seed: int | None = None, start: int = 0) -> Tensor:
        """Samples start, start + 1, ... as uint8 pictures [n, C, H, W], denoised if training added noise.

        Sample i is made of the same noise and label whatever the plan is.
        """
        parts = []
        for i in range(start, start + n, AT_ONCE):
            count = min(AT_ONCE, start + n - i)
            parts.append(self.shown(self.pictures(name, plan, count, seed=seed, start=i)))
        return torch.cat(parts)

    def pictures(self, name: str, plan: Plan, n: int, *, seed: int | None = None, start: int = 0) -> Tensor:
        """The samples of `draw` all at once, in [-1, 1]; not all need be finite."""
        flow, labels = self.flow(name), self.labels(name, n, start)
        z = flow.noise(n, self.seed if seed is None else seed, start=start)
        x = flow.decode(z, plan, labels=labels, guidance=self.guide).x
        return self.clean(name, x, labels)

    @staticmethod
    def shown(x: Tensor) -> Tensor:
        """Pictures as uint8, black where they are not finite."""
        return as_pixels(x.nan_to_num(-1.0)).cpu()

    def clean(self, name: str, x: Tensor, labels: Tensor | None) -> Tensor:
        """Samples as pictures [N, C, H, W] in [-1, 1], without the noise of training."""
        flow = self.flow(name)
        if getattr(flow.config, "noise_std", 0.0):
            x = flow.denoise(x, labels)
        found = as_images(x)
        assert found is not None, "only models of images are asked for pictures"
        return found

    def wanted(self, name: str) -> int:
        """How many samples are judged: --samples, else the scale's, else as many as there are images."""
        most = self.samples or self.scale.samples
        return most if most is not None else len(self.images(name)[0])

    def few(self, name: str) -> int:
        """How many samples are judged where a method is one of many: --samples, else the scale's."""
        return self.wanted(name) if self.samples or self.scale.few is None else self.scale.few

    def at_most(self, n: int, most: int | None) -> int:
        """n, or fewer where the scale has a limit; --samples lifts it."""
        return n if self.samples or most is None else min(n, most)

    @property
    def guide(self) -> Guidance:
        """Of samples that are judged and shown."""
        return Guidance(weight=self.guidance, annealed=True)


@dataclass(frozen=True)
class Context:
    """One item on one model: the workshop, the model, and the folder for pictures."""

    workshop: Workshop
    model: str
    folder: Path

    @cached_property
    def flow(self) -> Flow:
        """The model."""
        return self.workshop.flow(self.model)

    @property
    def scale(self) -> Scale:
        """How much of everything."""
        return self.workshop.scale

    @property
    def seed(self) -> int:
        """Of the noise."""
        return self.workshop.seed

    @property
    def restricted(self) -> bool:
        """Whether pictures may not be handed on."""
        return MODELS[self.model].restricted

    def labels(self, n: int, start: int = 0) -> Tensor | None:
        """All classes in turn."""
        return self.workshop.labels(self.model, n, start)

    def condition(self, n: int) -> dict[str, Any]:
        """The labels of n samples as `Flow.decode` takes them; nothing for a model without."""
        labels = self.labels(n)
        return {} if labels is None else {"labels": labels}

    def picture(self, name: str) -> Path:
        """Where a picture of this item and model goes."""
        return self.folder / f"{self.model}-{name}.png"

    def weights(self) -> str:
        """The digest of the model's weights."""
        return digest(self.flow.state_dict(), self.flow.family, repr(self.flow.config))
