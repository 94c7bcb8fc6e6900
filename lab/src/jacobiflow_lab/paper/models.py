"""The models that items are measured on, at each scale, and how much of everything is measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScaleName = Literal["cpu", "paper"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model by its name: its recipe, the paper's name of the data, and what may be done with pictures."""

    name: str
    recipe: str
    beside: str  # the paper's data set that it stands beside; "" if it has none
    hours: float  # of training by the recipe, on the machine that its scale is for
    restricted: bool = False  # the data's licence forbids handing pictures on


MODELS = {
    m.name: m
    for m in (
        Model(name="mnist", recipe="mnist-cpu", beside="", hours=1.25),
        Model(name="cifar10-cpu", recipe="cifar10-cpu", beside="CIFAR-10", hours=1.1),
        Model(name="cifar100-cpu", recipe="cifar100-cpu", beside="CIFAR-100", hours=0.75),
        Model(name="afhq-cat64-cpu", recipe="afhq-cat64-cpu", beside="AFHQ", hours=0.75, restricted=True),
        Model(name="cifar10", recipe="cifar10", beside="CIFAR-10", hours=100),
        Model(name="cifar100", recipe="cifar100", beside="CIFAR-100", hours=100),
        Model(name="afhq256", recipe="afhq256", beside="AFHQ", hours=1000, restricted=True),
        Model(name="mnist-maf", recipe="mnist-maf", beside="binary MNIST", hours=0.2),
        Model(name="ising-16", recipe="ising", beside="Ising", hours=0.1),
        Model(name="ising-maf", recipe="ising-maf", beside="Ising", hours=0.1),
    )
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of everything: the paper's rules where there is a GPU, what an hour allows elsewhere."""

    name: ScaleName
    images: tuple[str, ...]  # TarFlows
    judged: tuple[str, ...]  # those whose samples get FID, the others get KID and the paired distance
    generators: tuple[str, ...]  # compared with a GAN and with DDIM
    batches: tuple[int, ...]  # timed; the last one is the table's
    repeats: int  # decodings a run
    runs: int = 3
    quality_runs: int  # runs over which quality is measured
    samples: int | None  # judged; None is as many as the data set has
    beyond: int | None  # judged of methods that the paper does not have; None is as many as of its own
    few: int | None  # judged where a method is one of many; None is as many as of its own
    scored: int | None  # of those judged, get BRISQUE and CLIP-IQA, which are slow; None is all
    shown: int = 64  # samples of a grid
    analysed: int = 16  # samples of analyses
    reconstructed: int = 256
    ising: int = 100_000
    taus: tuple[float, ...] = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0)


SCALES: dict[str, Scale] = {
    "cpu": Scale(
        name="cpu",
        images=("mnist", "cifar10-cpu", "cifar100-cpu", "afhq-cat64-cpu"),
        judged=("mnist", "cifar10-cpu"),
        generators=("cifar10-cpu",),
        batches=(1, 16),
        repeats=3,
        quality_runs=1,
        samples=1000,
        beyond=100,
        few=100,
        scored=100,
    ),
    "paper": Scale(
        name="paper",
        images=("cifar10", "cifar100", "afhq256"),
        judged=("cifar10", "cifar100", "afhq256"),
        generators=("cifar10",),
        batches=(256,),
        repeats=10,
        quality_runs=3,
        samples=None,
        beyond=None,
        few=None,
        scored=None,
        reconstructed=10_000,
    ),
}
