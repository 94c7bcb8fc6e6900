"""What the analyses share: the exact answers block by block, parts of a batch, records as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from jacobiflow.core.block import Block
from jacobiflow.core.decode import decode
from jacobiflow.core.records import as_json
from jacobiflow.core.types import Method
from jacobiflow.flows.flow import Flow


@dataclass(frozen=True)
class Layer:
    """A block with its input and its exact output, [N, T, D]."""

    block: Block
    z: Tensor
    x: Tensor


def exact_layers(flow: Flow, z: Tensor, **condition: Any) -> Iterator[Layer]:
    """The blocks in sampling order, each solved exactly from the exact output of the one before.

    condition: labels, context, guidance (a Guidance), as `Flow.bound_blocks` takes them.
    """
    seq = flow.to_prior(z)
    for block in flow.bound_blocks(len(z), **condition):
        layer = Layer(block, seq, decode(block, seq, Method(width=1)).x)
        yield layer
        seq = layer.x


def part(condition: dict[str, Any], rows: slice, n: int) -> dict[str, Any]:
    """Labels or context of these rows of n; what all rows share stays."""
    return {
        key: value[rows] if isinstance(value, Tensor) and value.ndim and len(value) == n else value
        for key, value in condition.items()
    }


def plain(record: Any) -> dict[str, Any]:
    """A dataclass as JSON has it."""
    found: dict[str, Any] = as_json(asdict(record))
    return found
