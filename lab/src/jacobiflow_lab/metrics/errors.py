"""What goes wrong with metrics, and the packages that only they need."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from jacobiflow.core.results import JacobiflowError
from jacobiflow.core.suggest import pip_install


class MetricError(JacobiflowError, ValueError):
    """A metric that does not go with a model, its data or this installation; one line says what to do."""


def optional(module: str, purpose: str) -> Any:
    """The module, or one line that says which extra has it; its own deprecations stay quiet."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        missing = getattr(error, "name", None) or module
        raise MetricError(
            f"{purpose} needs the package {missing.partition('.')[0]}: {pip_install('lab[eval]')}"
        ) from None
