"""What a metric is, and what goes wrong. One file defines it as a `Metric`; one row of `registry.py` adds it."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import torch
from torch import Tensor

from jacobiflow.core.results import JacobiflowError
from jacobiflow.core.tables import pip_install

if TYPE_CHECKING:
    from jacobiflow_lab.metrics.moments import Moments
    from jacobiflow_lab.metrics.samples import SampleFeatures, Sampling

Need = Literal["images", "features", "reference", "real", "clip", "flow"]
Row = tuple[str, str, str, str]  # of the table: metric, value, which direction is better, computed from what
Score = Callable[[Tensor], Tensor]  # images [n, C, H, W] to one number per image, [n]


class Evidence(TypedDict, total=False):
    """What results are computed from; what no metric needs is absent."""

    samples: SampleFeatures
    reference: SampleFeatures  # the same samples, decoded by the reference plan
    real: Moments  # features of real images
    values: dict[str, Tensor]  # by metric: what `Metric.each` returned
    sampling: Sampling
    network: str  # version of the feature network
    clip: str
    reference_plan: str


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


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric: what it needs, how it is computed, what is said about it.

    needs: "images" (samples that are images), "features" (their Inception features), "reference" (features of
        the same samples decoded by the reference plan), "real" (real images), "clip" (weights of a CLIP),
        "flow" (more than its samples).
    score: loads what scores one image; called with the CLIP and the device before any work is done.
    each: numbers of the items `index`, one row per item: of real images if the metric needs them, else of
        samples. Processes share the items.
    result: a dataclass, from the evidence; its fields are the JSON. One process computes it.
    rows, note: templates of the table's rows and of what is said below it, filled with the result's fields.
    """

    name: str
    help: str
    result: Callable[[Evidence], Any]
    rows: tuple[Row, ...]
    note: str = ""
    needs: tuple[Need, ...] = ()
    packages: tuple[str, ...] = ()  # whose versions the result depends on
    brings: tuple[str, ...] = ()  # metrics that are always shown beside this one
    score: Callable[[str, torch.device], Score] | None = None
    each: Callable[[Sampling, Tensor], Tensor] | None = None

    def to_dict(self, result: Any) -> dict[str, Any]:
        """A result as plain data for JSON, with the note."""
        fields = asdict(result)
        return fields | ({"note": self.note.format(**fields)} if self.note else {})

    def text(self, result: Any) -> list[tuple[str, ...]]:
        """A result as rows of the table."""
        fields = asdict(result)
        return [tuple(cell.format(**fields) for cell in row) for row in self.rows]


def mean_and_error(name: str, values: Tensor) -> dict[str, Any]:
    """Fields of a mean over images of the finite values [N]: value, standard error, images.

    >>> mean_and_error("score", torch.tensor([1.0, 3.0, float("nan")]))
    {'value': 2.0, 'error': 1.0, 'images': 2}
    """
    kept = values[values.isfinite()].double()
    if len(kept) < 2:
        raise MetricError(f"{name}: {len(kept)} of {len(values)} images have a finite value: 2 are needed")
    return {"value": float(kept.mean()), "error": float(kept.std() / len(kept) ** 0.5), "images": len(kept)}
