"""What analyses share: blocks with their exact answers, rows of a condition, records as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from torch import Tensor

from jacobiflow.core.block import Block
from jacobiflow.core.decode import decode
from jacobiflow.core.method import Method
from jacobiflow.core.records import as_json
from jacobiflow.flows.flow import Flow

Note = Callable[[str], object]  # called with a line about progress
SEQUENTIAL = Method(width=1)


class Record:
    """Base class of the dataclasses that analyses return."""

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON."""
        fields: dict[str, Any] = as_json(asdict(self))  # type: ignore[call-overload]
        return fields


def exact_blocks(flow: Flow, z: Tensor, **condition: Any) -> Iterator[tuple[Block, Tensor, Tensor]]:
    """The blocks in sampling order, each with its exact input and its exact output, [N, T, D].

    condition: labels, context, guidance (a Guidance), as `Flow.bound_blocks` takes them.
    """
    x = flow.to_prior(z)
    for block in flow.bound_blocks(len(z), **condition):
        z, x = x, decode(block, x, SEQUENTIAL).x
        yield block, z, x


def select_rows(condition: dict[str, Any], rows: slice, n: int) -> dict[str, Any]:
    """Labels or context of these rows of n; what all rows share stays."""
    return {
        key: value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == n else value
        for key, value in condition.items()
    }
