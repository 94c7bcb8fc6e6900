"""The models that the page offers, and what it lets people ask of them."""

from __future__ import annotations

import math
import threading
from typing import get_args

import torch
from torch import Tensor

from jacobiflow.core.types import INITS, Init, JacobiflowError
from jacobiflow.data.pictures import as_images
from jacobiflow.data.transforms import Noise
from jacobiflow.flows.checkpoint import bundled_names, load
from jacobiflow.flows.flow import PLANS, Flow
from jacobiflow.training.recipe import Recipe, recipe_names

MOST = 64  # samples at once
NUMBERS = 2**20  # that samples may have in all: fewer samples of large pictures
RUNS = 5  # of each plan
LARGEST_SEED = 2**32 - 1
LARGEST_TOL = 10.0
LARGEST_GUIDANCE = 10.0


class Refused(JacobiflowError, ValueError):
    """Something that was asked for on the page and cannot be done; the message is for the asker."""


class Shelf:
    """Models by name, the first one first; they are shared by all visitors and never written to."""

    def __init__(self, first: str, device: torch.device | str = "cpu") -> None:
        self.left_out: dict[str, str] = {}
        self._flows: dict[str, Flow] = {}
        self.work = threading.Lock()  # one thing is computed at a time: two would time each other
        for name in dict.fromkeys([first, *bundled_names()]):
            flow = load(name, device=device)
            reason = unfit(flow)
            if reason is None:
                self._flows[name] = flow
            elif name == first:
                raise Refused(f"--model {name}: {reason}")
            else:
                self.left_out[name] = reason

    @property
    def names(self) -> list[str]:
        """All that can be sampled."""
        return list(self._flows)

    @property
    def invertible(self) -> list[str]:
        """Those that know pictures: a lattice field is nothing that one draws."""
        return [name for name, flow in self._flows.items() if flow.target is None]

    def __getitem__(self, name: object) -> Flow:
        if not isinstance(name, str) or name not in self._flows:
            raise Refused(f"there is no model {str(name)[:60]!r} here: choose {' or '.join(self._flows)}")
        return self._flows[name]


def unfit(flow: Flow) -> str | None:
    """Why the page cannot show this flow; None if it can."""
    if flow.context_features:
        return "it needs context, which the page cannot give: use flow.sample in Python"
    if as_images(torch.empty(1, *flow.data_shape)) is None:
        return "its samples are not pictures: use jacobiflow sample"
    return None


def most(flow: Flow) -> int:
    """How many samples may be drawn at once.

    >>> from jacobiflow import MAF, MAFConfig
    >>> most(MAF(MAFConfig(features=16, blocks=1, hidden=(4,))))
    64
    """
    return min(MOST, max(1, NUMBERS // math.prod(flow.data_shape)))


def training_noise(flow: Flow) -> Noise:
    """What training added to the pictures: as the recipe of this very model says, else Gaussian or none."""
    for name in recipe_names():
        recipe = Recipe.load(name)
        if recipe.model == flow.config and recipe.target is None:
            return recipe.training.noise
    return "gaussian" if getattr(flow.config, "noise_std", 0.0) else "none"


# What comes from a page may be anything: fields can be empty, and not only pages send requests.


def whole(value: object, name: str, low: int, high: int) -> int:
    """A whole number within bounds.

    >>> whole(None, "Seed", 0, 9)
    Traceback (most recent call last):
    jacobiflow_lab.app.models.Refused: Seed: give a whole number from 0 to 9
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(f"{name}: give a whole number from {low} to {high}")
    if value != int(value):
        raise Refused(f"{name}: give a whole number from {low} to {high}, not {value:g}")
    return int(value)


def number(value: object, name: str, low: float, high: float) -> float:
    """A number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise Refused(f"{name}: give a number from {low:g} to {high:g}")
    return float(value)


def chosen_plan(value: object) -> str:
    """One of the named plans; files of this machine are nobody's business."""
    if value not in PLANS:
        raise Refused(f"Plan: choose {', '.join(PLANS)}")
    return str(value)


def chosen_init(value: object) -> Init:
    """One of the first guesses."""
    for init in INITS:
        if value == init:
            return init
    raise Refused(f"First guess: choose {', '.join(get_args(Init))}")


def chosen_labels(values: object, flow: Flow) -> list[int]:
    """Labels that the flow knows; none of them is no label."""
    found = values if isinstance(values, list | tuple) else [] if values in (None, "") else [values]
    if not flow.num_classes or not found:
        return []
    if len(found) > flow.num_classes:
        raise Refused(f"Labels: choose at most {flow.num_classes}")
    labels = []
    for value in found:
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < flow.num_classes):
            raise Refused(f"Labels: choose from 0 to {flow.num_classes - 1}, not {text[:20]!r}")
        labels.append(int(text))
    return labels


def in_turn(labels: list[int], n: int) -> Tensor | None:
    """Labels of n samples; None is no label.

    >>> in_turn([3, 5], 3).tolist()
    [3, 5, 3]
    """
    return torch.tensor(labels)[torch.arange(n) % len(labels)] if labels else None
