"""A pytest plugin that accelerates every transform of nflows, zuko and normflows at its first use.

Their own test suites must give the same results in three modes, JACOBIFLOW_MODE: "original", "accelerated",
and "always", in which ours runs wherever it can:
    PYTHONPATH=tests JACOBIFLOW_MODE=always pytest -p adapters.everything FOLDER/tests
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from nflows.transforms.autoregressive import AutoregressiveTransform
from normflows.flows.affine.autoregressive import Autoregressive
from zuko.flows.autoregressive import MaskedAutoregressiveTransform

import jacobiflow as jf
from jacobiflow.adapters import patch

MODE = os.environ.get("JACOBIFLOW_MODE", "original")
inside, ran = [0], dict[str, int]()


def accelerate_first(kind: type, name: str) -> None:
    """Make a method of a class accelerate its object before the first call."""
    original: Callable[..., Any] = getattr(kind, name)

    def method(self: Any, *args: Any, **options: Any) -> Any:
        if inside[0]:  # called by the patch or by its self-test
            return original(self, *args, **options)
        inside[0] += 1
        try:
            if name not in vars(self):
                with suppress(jf.AccelerationError), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    jf.accelerate(self)
            found = vars(self).get(name)
            return (original.__get__(self) if found is None else found)(*args, **options)
        finally:
            inside[0] -= 1

    setattr(kind, name, method)


def pytest_configure() -> None:
    if MODE == "original":
        return
    for kind, name in (
        (AutoregressiveTransform, "inverse"),
        (Autoregressive, "inverse"),
        (MaskedAutoregressiveTransform, "forward"),
    ):
        accelerate_first(kind, name)
    count = patch.Tally.count

    def counted(self: Any, way: str, *args: Any, **options: Any) -> None:
        ran[way] = ran.get(way, 0) + 1
        count(self, way, *args, **options)

    patch.Tally.count = counted  # type: ignore[method-assign]
    if MODE == "always":
        patch.FEW_PASSES = 0
        patch.winner = lambda key: None  # type: ignore[assignment]
        patch.race = lambda key, ways, *rest: list(ways)[-1]  # type: ignore[assignment]


def pytest_runtest_setup() -> None:
    torch.manual_seed(0)  # the same weights and noise in every mode


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"mode {MODE}: {ran}")
