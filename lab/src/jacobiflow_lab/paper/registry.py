"""All items: those that the files of this package define, in the order of `tables.toml`.

They run in that order: cheap ones, and ones that others build on, come first.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from jacobiflow_lab import paper
from jacobiflow_lab.paper.schema import Item
from jacobiflow_lab.paper.tables import TABLES, sections


@cache
def every_item() -> dict[str, Item]:
    """The items by name."""
    modules = [import_module(f"{paper.__name__}.{file.name}") for file in iter_modules(paper.__path__)]
    defined = {item.name: item for module in modules for item in vars(module).values() if isinstance(item, Item)}
    return {name: defined[name] for name in TABLES}


def choose(names: tuple[str, ...]) -> list[Item]:
    """The items of these names or of sections of these names, and those that they use, in running order.

    Default: all.
    """
    chosen = set(() if names else TABLES)
    for name in names:
        found = {name} if name in TABLES else {item for item in TABLES if name in sections(item)}
        if not found:
            known = dict.fromkeys((*TABLES, *(section for item in TABLES for section in sections(item))))
            raise ValueError(f"no item is called {name!r}; there are {', '.join(known)}")
        chosen |= found
    used = {name for item in chosen for name in every_item()[item].uses}
    return [item for item in every_item().values() if item.name in chosen | used]
