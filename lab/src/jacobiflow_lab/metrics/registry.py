"""The metrics of `evaluate`, one row each. Help, checks, table and JSON follow from the rows."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from jacobiflow_lab.metrics.brisque import BRISQUE
from jacobiflow_lab.metrics.clip_iqa import CLIP_IQA, ClipScorer
from jacobiflow_lab.metrics.fid import FRECHET, KERNEL
from jacobiflow_lab.metrics.likelihood import BITS_PER_DIM
from jacobiflow_lab.metrics.metric import Metric, MetricError
from jacobiflow_lab.metrics.paired import PAIRED
from jacobiflow_lab.metrics.reconstruction import INVERTIBILITY, RECONSTRUCTION

ROWS = (FRECHET, KERNEL, BRISQUE, CLIP_IQA, BITS_PER_DIM, RECONSTRUCTION, INVERTIBILITY, PAIRED)
METRICS: dict[str, Metric] = {metric.name: metric for metric in ROWS}


def select(names: Sequence[str]) -> list[Metric]:
    """The metrics of these names and those that they bring, in the order of the registry."""
    for name in names:
        if name not in METRICS:
            raise MetricError(f"metrics are {', '.join(METRICS)}, not {name!r}")
    wanted = {*names, *(other for name in names for other in METRICS[name].brings)}
    return [metric for metric in METRICS.values() if metric.name in wanted]


def check_request(
    names: Sequence[str], data: Sized | None, clip: str | None, *, samples: int, real: int | None
) -> None:
    """Reject what cannot be measured, before any work is done. data: anything not empty, if there is some."""
    for metric in select(names):
        if "real" in metric.needs and not data:
            raise MetricError(f"{metric.name} needs real images: give --data (data= in Python)")
        if "clip" in metric.needs and not clip:
            ClipScorer(clip)  # the error says how to give one
    for what, count in (("samples", samples), ("real images", real)):
        if count is not None and count < 2:
            raise MetricError(f"metrics need 2 {what} or more, not {count}")
