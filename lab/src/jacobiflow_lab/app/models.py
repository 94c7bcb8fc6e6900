"""The models that the page offers, and checks of the values that visitors send."""

from __future__ import annotations

import math
import threading
import tomllib
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import torch

from jacobiflow.core.method import INITS
from jacobiflow.core.results import JacobiflowError
from jacobiflow.flows.checkpoint import bundled_names, load
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.plans import PLANS, SWEPT
from jacobiflow_lab.lattice.lattice_flow import LatticeFlow

MAX_SAMPLES = 64  # per request
MAX_NUMBERS = 2**20  # in all samples of a request: fewer samples of large images
MAX_RUNS = 60
MAX_SEED = 2**32 - 1
MAX_TOL = 10
MAX_GUIDANCE = 10
TEXTS = tomllib.loads(files(__package__).joinpath("texts.toml").read_text(encoding="utf-8"))


class UserError(JacobiflowError, ValueError):
    """A request that cannot be done. The message tells the user what to do."""


class ModelRegistry:
    """Models by name, `first` first. All visitors share them, and nothing writes to them."""

    def __init__(self, first: str, device: torch.device | str = "cpu") -> None:
        self.left_out: dict[str, str] = {}  # names and reasons
        self._flows: dict[str, Flow] = {}
        self.lock = threading.Lock()  # one computation at a time, so that timings are not disturbed
        for name in dict.fromkeys([first, *bundled_names()]):
            flow = load(name, device=device)
            reason = unsupported(flow)
            if reason is None:
                self._flows[name] = flow
            elif name == first:
                raise UserError(f"--model {name}: {reason}")
            else:
                self.left_out[name] = reason
        self.names = list(self._flows)
        # Nobody draws a lattice field.
        self.invertible = [n for n, flow in self._flows.items() if not isinstance(flow, LatticeFlow)]

    def label_names(self, name: str) -> list[str]:
        """The names of a model's labels in order, else the numbers."""
        flow = self[name]
        return list(flow.class_names or map(str, range(flow.num_classes)))

    def __getitem__(self, name: object) -> Flow:
        if not isinstance(name, str) or name not in self._flows:
            raise UserError(f"there is no model {str(name)[:60]!r} here: choose {' or '.join(self._flows)}")
        return self._flows[name]


def unsupported(flow: Flow) -> str | None:
    """The reason why the page cannot show this flow, or None."""
    if flow.context_features:
        return "it needs context, which the page cannot give: use flow.sample in Python"
    if flow.image_shape is None:
        return "its samples are not images: use jacobiflow sample"
    return None


def max_samples(flow: Flow) -> int:
    """The largest number of samples per request.

    >>> from jacobiflow import MAF, MAFConfig
    >>> max_samples(MAF(MAFConfig(features=16, blocks=1, hidden=(4,))))
    64
    """
    return min(MAX_SAMPLES, max(1, MAX_NUMBERS // math.prod(flow.data_shape)))


# Checks of values. A field can be empty, and not only the page sends requests.


def number(value: object, name: str, low: int, high: int, kind: str = "number") -> float:
    """A number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise UserError(f"{name}: give a {kind} from {low} to {high}")
    return float(value)


def whole(value: object, name: str, low: int, high: int) -> int:
    """A whole number within bounds.

    >>> whole(None, "Seed", 0, 9)
    Traceback (most recent call last):
    jacobiflow_lab.app.models.UserError: Seed: give a whole number from 0 to 9
    """
    checked = number(value, name, low, high, "whole number")
    if not checked.is_integer():
        raise UserError(f"{name}: give a whole number from {low} to {high}, not {checked:g}")
    return int(checked)


def choice(value: object, name: str, options: Sequence[str]) -> str:
    """One of the options."""
    if value not in options:
        raise UserError(f"{name}: choose {', '.join(options)}")
    return str(value)


def chosen_plan(plan: object, tol: object, init: object) -> tuple[str, dict[str, Any]]:
    """A plan's name and its options. Visitors cannot name plan files."""
    name = choice(plan, "Plan", PLANS)
    if name not in SWEPT:
        return name, {}
    return name, {"tol": number(tol, "Tolerance", 0, MAX_TOL), "init": choice(init, "First guess", INITS)}


def chosen_guidance(value: object, flow: Flow, *, labelled: bool) -> Guidance:
    """Guidance. Models without labels have none, whatever the field says."""
    if not flow.num_classes:
        return Guidance()
    guide = Guidance(weight=number(value, "Guidance", 0, MAX_GUIDANCE))
    if guide.weight and not labelled:
        raise UserError("Guidance pushes samples towards their label: choose labels, or set it to 0")
    return guide


def chosen_labels(values: object, flow: Flow) -> list[int]:
    """Labels that the flow knows. An empty list means no label."""
    given = values if isinstance(values, list | tuple) else [] if values in (None, "") else [values]
    count = flow.num_classes
    names = [str(i) for i in range(count)]
    if not names:
        return []
    if len(given) > count or any(str(value) not in names for value in given):
        raise UserError(f"Labels: choose at most {count} from 0 to {count - 1}")
    return [int(str(value)) for value in given]
