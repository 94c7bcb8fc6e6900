"""What the analyses share: the exact answers block by block, parts of a batch, records as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.decode import sequential
from jacobiflow.core.records import as_json
from jacobiflow.core.types import Block
from jacobiflow.flows.flow import Flow


@dataclass(frozen=True)
class Layer:
    """A block with its input and its exact output, [N, T, D], both in the block's own order."""

    block: Block
    order: Tensor | None
    z: Tensor
    x: Tensor

    def take(self, seq: Tensor) -> Tensor:
        """A sequence of the flow in the block's order."""
        return seq if self.order is None else seq[:, self.order]

    def give(self, x: Tensor) -> Tensor:
        """A sequence of the block in the flow's order."""
        return x if self.order is None else x[:, torch.argsort(self.order)]


def exact_layers(flow: Flow, z: Tensor, **condition: Any) -> Iterator[Layer]:
    """The blocks in sampling order, each solved exactly from the exact output of the one before.

    condition: labels, context, guidance (a Guidance), as `Flow.bound_blocks` takes them.
    """
    seq = flow.to_prior(z)
    for block, order in flow.bound_blocks(len(z), **condition):
        given = seq if order is None else seq[:, order]
        layer = Layer(block, order, given, sequential(block, given).x)
        yield layer
        seq = layer.give(layer.x)


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
