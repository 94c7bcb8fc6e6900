"""Flow families by name: the library's own, and those of the entry-point group `jacobiflow.families`.

A folder `recipes` beside the module of a registered class holds recipes for `jacobiflow train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoints, entry_points
from importlib.resources import files
from importlib.resources.abc import Traversable
from itertools import chain
from reprlib import repr as short
from typing import Any

from jacobiflow.core.records import RecordError
from jacobiflow.core.tables import pip_install
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.maf import MAF
from jacobiflow.flows.tarflow import TarFlow

LAB = "jacobiflow-lab"  # the distribution with further families
OWN: dict[str, type[Flow]] = {family.family: family for family in (TarFlow, MAF)}
MOVED = {"reach": 0, "linear": False}  # fields of MAFs of version 0.1: with other values, they belong to LAB


def registered() -> EntryPoints:
    """The families of other distributions, not yet imported."""
    return entry_points(group="jacobiflow.families")


def find_family(name: object) -> type[Any]:
    """The family of this name."""
    if isinstance(name, str) and name in OWN:
        return OWN[name]
    others = registered()
    if isinstance(name, str) and name in others.names:
        return others[name].load()  # type: ignore[no-any-return]
    known = ", ".join([*OWN, *sorted(others.names)])
    more = "" if others else f"; {LAB} has more families: {pip_install('lab')}"
    raise RecordError(f"family must be one of {known}, not {short(name)}{more}")


def loads_as_itself(kind: type[Flow]) -> bool:
    """Whether a checkpoint of such a flow is loaded as one: a subclass may keep the name of its parent."""
    return find_family(kind.family) is kind


def family_of(config: Any) -> type[Any]:
    """The family whose flows have configs of this type."""
    families = chain[type[Flow]](OWN.values(), (entry.load() for entry in registered()))
    return next(family for family in families if family.config_type is type(config))


def recipe_files() -> dict[str, Traversable]:
    """The bundled recipes, those of registered families too, by name."""
    homes = ["jacobiflow.training", *(entry.module.rpartition(".")[0] for entry in registered())]
    folders = [folder for home in homes if (folder := files(home) / "recipes").is_dir()]
    every = [file for folder in folders for file in folder.iterdir()]
    return {f.name.removesuffix(".toml"): f for f in every if f.name.endswith(".toml")}


def upgrade(doc: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config document of a checkpoint of version 0.1, which stored other families as MAFs with more fields."""
    config = doc.get("config")
    if doc.get("family") != MAF.family or not isinstance(config, dict):
        return doc
    if doc.get("target") is None and all(config.get(k, v) == v for k, v in MOVED.items()):
        return {**doc, "config": {k: v for k, v in config.items() if k not in MOVED}}
    for entry in registered():
        adopted: Mapping[str, Any] | None = entry.load().adopt(doc)
        if adopted is not None:
            return adopted
    raise RecordError(f"this flow of version 0.1 is now part of {LAB}: {pip_install('lab')}")
