"""The models and the amount of measuring at each scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ScaleName = Literal["cpu", "paper"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model: its recipe, the paper's data set that it stands beside, and whether pictures may be shared."""

    name: str
    recipe: str
    beside: str  # the paper's data set; "": none
    hours: float  # of training by the recipe, on the machine that its scale is for
    restricted: bool = False  # the licence of the data forbids redistribution of pictures


MODELS = {
    m.name: m
    for m in (
        Model(name="mnist", recipe="mnist-cpu", beside="", hours=1.25),
        Model(name="cifar10-cpu", recipe="cifar10-cpu", beside="CIFAR-10", hours=1.1),
        Model(name="cifar100-cpu", recipe="cifar100-cpu", beside="CIFAR-100", hours=0.75),
        Model(name="afhq-cat64-cpu", recipe="afhq-cat64-cpu", beside="AFHQ", hours=0.75, restricted=True),
        Model(name="cifar10-paper", recipe="cifar10-paper", beside="CIFAR-10", hours=100),
        Model(name="cifar100-paper", recipe="cifar100-paper", beside="CIFAR-100", hours=100),
        Model(name="afhq256", recipe="afhq256", beside="AFHQ", hours=1000, restricted=True),
        Model(name="mnist-maf", recipe="mnist-maf", beside="binary MNIST", hours=0.2),
        Model(name="ising-16", recipe="ising", beside="Ising", hours=0.1),
        Model(name="ising-maf", recipe="ising-maf", beside="Ising", hours=0.1),
    )
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is measured: by the paper's rules with a GPU, or what an hour on a CPU allows."""

    name: ScaleName
    images: tuple[str, ...]  # TarFlows
    judged: tuple[str, ...]  # get FID; the others get KID and the paired distance
    generators: tuple[str, ...]  # compared with a GAN and with DDIM
    batches: tuple[int, ...]  # timed; the last one is the table's
    repeats: int  # batches per run
    runs: int = 3
    quality_runs: int  # runs of the quality scores
    samples: int | None = None  # scored; None: as many as the data set has
    beyond: int | None = None  # scored of methods that the paper does not have; None: as many as of its own
    few: int | None = None  # scored where a method is one of many; None: all
    scored: int | None = None  # of those, with BRISQUE and CLIP-IQA, which are slow; None: all
    shown: int = 64  # samples in a grid
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
        images=("cifar10-paper", "cifar100-paper", "afhq256"),
        judged=("cifar10-paper", "cifar100-paper", "afhq256"),
        generators=("cifar10-paper",),
        batches=(256,),
        repeats=10,
        quality_runs=3,
        reconstructed=10_000,
    ),
}
