"""All items in the order in which they run: cheap ones, and ones that others build on, come first."""

from __future__ import annotations

from jacobiflow_lab.paper import (
    configuration,
    convergence,
    costs,
    generators,
    maf,
    quality,
    redundancy,
    sampling,
    timing,
    undertrained,
)
from jacobiflow_lab.paper.schema import Item
from jacobiflow_lab.paper.tables import sections

ITEMS: dict[str, Item] = {
    item.name: item
    for item in (
        *(configuration.ITEM, timing.ITEM, sampling.SAMPLES, redundancy.ITEM, convergence.ITEM),
        *(costs.SWEEPS, costs.MEMORY, costs.LENGTHS, costs.LARGEST, maf.MNIST, maf.ISING),
        *(sampling.RECONSTRUCTION, undertrained.ITEM, quality.COMPARISON, quality.TOLERANCE, generators.ITEM),
    )
}


def choose(names: tuple[str, ...]) -> list[Item]:
    """The items of these names or of sections of these names, and those that they use, in running order.

    Default: all.
    """
    chosen = set(() if names else ITEMS)
    for name in names:
        found = {name} if name in ITEMS else {item for item in ITEMS if name in sections(item)}
        if not found:
            known = dict.fromkeys((*ITEMS, *(section for item in ITEMS for section in sections(item))))
            raise ValueError(f"no item is called {name!r}; there are {', '.join(known)}")
        chosen |= found
    used = {name for item in chosen for name in ITEMS[item].uses}
    return [item for item in ITEMS.values() if item.name in chosen | used]
