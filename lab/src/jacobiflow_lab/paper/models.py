"""The models and the amount of measuring at each scale."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jacobiflow.core.method import Init
from jacobiflow_lab.paper.paper_items import read_toml

ScaleName = Literal["cpu", "paper"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and how it is trained."""

    name: str
    recipe: str = ""  # "": random weights of the configuration in `Scale.random`
    hours: float = 0.0  # of training by the recipe, on the machine that its scale is for
    small: bool = False  # a fraction of the paper's positions and width
    restricted: bool = False  # the data are CC BY-NC: pictures need the attribution, and are in no package


MODELS = {name: Model(name=name, **fields) for name, fields in read_toml("models.toml").items()}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured: by the paper's rules with a GPU, or what a CPU allows. `analyze` has its own."""

    name: ScaleName
    images: tuple[str, ...]  # TarFlows
    judged: tuple[str, ...] = ()  # the main models: they get `samples` and FID, the others `small` and KID
    generators: tuple[str, ...] = ()  # compared with a GAN and with DDIM
    batches: tuple[int, ...]  # timed; the last one is the table's
    repeats: int = 10  # batches per run, as in the paper
    runs: int = 3
    backends: tuple[Literal["torch", "c", "compile"] | None, ...] = ("torch", None)  # None: the fastest
    methods: tuple[str, ...] = ()  # that are timed; (): all
    samples: int | None = None  # scored by the paper's decoders; None: as many as the data set has
    few: int | None = None  # scored where a method is one of many; None: as many
    small: int = 100  # scored of models that are not judged
    scored: int | None = None  # of those, with BRISQUE and CLIP-IQA, which are slow; None: all
    resamples: int = 100  # of the bootstrap
    guided: float = 1.0  # weight of annealed guidance in its own row of the quality table
    shown: int = 64  # samples in a grid
    analysed: int = 16  # samples of analyses
    swept: int = 64  # samples whose sweeps are counted
    reconstructed: int = 256
    ising: int = 100_000
    memory_batch: int = 16  # the paper's
    memory_sides: tuple[int, ...] = (16, 32, 48)  # of images with patches of 2: 64, 256 and 576 positions
    tau: float | None = 0.5  # the paper's; None: the flow's default
    taus: tuple[float, ...] = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)
    inits: tuple[Init | None, ...] = ("zeros", "previous")  # the paper's first; None: the flow's default
    offsets: tuple[int, ...] = (1, 2, 5)  # nearest predecessors that are masked
    seconds_per_image: float = 0.2  # of Inception and of drawing it, for the estimate of the remaining time
    random: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {
            # One block of the paper's AFHQ configuration: all eight have the same shape.
            "random-afhq": {"image_size": 256, "patch_size": 8, "width": 768, "layers_per_block": 8},
            # Two of the six layers of a block of the paper's CIFAR configuration.
            "random-cifar": {"image_size": 32, "patch_size": 2, "width": 256, "layers_per_block": 2},
        }
    )

    def sized(self, samples: int | None) -> Scale:
        """The same with this many samples everywhere; None: as it is."""
        return replace(self, samples=samples, few=samples, small=samples) if samples else self

    def scoring_minutes(self, model: str, methods: int, more: int = 0) -> float:
        """An estimate for the samples of so many of the paper's methods, and of so many others."""
        full = (self.samples or 50_000) if model in self.judged else self.small
        few = min(self.few or full, full)
        return (methods * full + more * few) * self.seconds_per_image / 60


SCALES: dict[str, Scale] = {
    "cpu": Scale(
        name="cpu",
        images=("mnist", "cifar10", "cifar100-cpu", "afhq-cat64-cpu"),
        judged=("mnist", "cifar10"),
        generators=("cifar10-cpu",),
        batches=(1, 16),
        samples=5000,
        few=1000,
        scored=1000,
    ),
    "paper": Scale(
        name="paper",
        images=("cifar10-paper", "cifar100-paper", "afhq256"),
        judged=("cifar10-paper", "cifar100-paper", "afhq256"),
        generators=("cifar10-paper",),
        batches=(256,),
        small=0,
        swept=1024,
        reconstructed=10_000,
    ),
}
