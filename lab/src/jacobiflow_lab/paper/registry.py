"""All items in the order in which they run: cheap ones, and ones that others build on, come first."""

from __future__ import annotations

from jacobiflow_lab.paper import (
    comparison,
    configuration,
    convergence,
    costs,
    generators,
    maf,
    reconstruction,
    redundancy,
    samples,
    timing,
    tolerance,
    undertrained,
)
from jacobiflow_lab.paper.schema import Item
from jacobiflow_lab.paper.tables import sections

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        configuration.ITEM,
        timing.ITEM,
        samples.ITEM,
        redundancy.ITEM,
        convergence.ITEM,
        costs.SWEEPS,
        costs.MEMORY,
        costs.LENGTHS,
        costs.LARGEST,
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
    """The items of these names or sections, and those that they use, in the order of running.

    Default: all.
    """
    known = dict.fromkeys(name for item in ITEMS.values() for name in (item.name, *sections(item.name)))
    for name in names:
        if name not in known:
            raise ValueError(f"no item is called {name!r}; there are {', '.join(known)}")
    chosen = [item for item in ITEMS.values() if not names or {item.name, *sections(item.name)} & set(names)]
    used = {name for item in chosen for name in item.uses}
    return [item for item in ITEMS.values() if item in chosen or item.name in used]
