"""All items in the order in which they run: cheap ones, and ones that others build on, come first."""

from __future__ import annotations

from jacobiflow_lab.paper import (
    comparison,
    configuration,
    convergence,
    costs,
    generators,
    initialisation,
    maf,
    reconstruction,
    redundancy,
    samples,
    tolerance,
    undertrained,
)
from jacobiflow_lab.paper.schema import Item

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        configuration.ITEM,
        samples.ITEM,
        redundancy.GENERATIONS,
        redundancy.SIMILARITY,
        convergence.ITEM,
        costs.SWEEPS,
        costs.RUNTIME,
        costs.MEMORY,
        initialisation.ITEM,
        maf.MNIST,
        maf.ISING,
        reconstruction.ITEM,
        undertrained.ITEM,
        comparison.ITEM,
        tolerance.ITEM,
        generators.ITEM,
    )
}


def choose(names: tuple[str, ...]) -> list[Item]:
    """The items of these names in the order of running. Default: all."""
    for name in names:
        if name not in ITEMS:
            raise ValueError(f"no item is called {name!r}; there are {', '.join(ITEMS)}")
    return [item for item in ITEMS.values() if not names or item.name in names]
