"""One block's way from its first guess to its answer, shown as what the whole flow would make of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.decode import decode
from jacobiflow.core.plan import Plan
from jacobiflow.core.types import Method, Sweep
from jacobiflow.flows.flow import Flow


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A few samples in one block; sequences [N, T, D] are in the order of the data."""

    block: int  # in sampling order
    swept: tuple[Tensor, ...]  # after 0, 1, 2, ... sweeps
    start: Tensor  # the block's input, with the first position known
    exact: Tensor
    rank: Tensor  # [T], the turn in which sequential decoding takes each position

    @property
    def length(self) -> int:
        """How many positions a sequence has."""
        return len(self.rank)

    def after_sweeps(self, sweeps: int) -> Tensor:
        """The guess after so many sweeps."""
        return self.swept[sweeps]

    def after_positions(self, steps: int) -> Tensor:
        """Sequential decoding after so many steps; the first position is given."""
        known = (self.rank <= steps).to(self.exact.device)
        return torch.where(known[:, None], self.exact, self.start)


def walk(flow: Flow, z: Tensor, block: int, plan: Plan, **condition: Any) -> Walk:
    """How `plan` solves one block of z; where it is sequential, sweeps over the whole sequence.

    condition: labels, context and guidance, as `flow.decode` takes them.
    """
    swept: list[Tensor] = []
    ends: list[Tensor] = []

    def guess(sweep: Sweep) -> None:
        if sweep.block == block:
            swept.append(sweep.x)

    def position(sweep: Sweep) -> None:
        if sweep.block == block:
            ends[1:] = [sweep.x]  # the first stays, the last is replaced

    sweeps = Method(tol=flow.default_tol, init=flow.default_init)
    methods = [sweeps if i == block and m.width == 1 else m for i, m in enumerate(plan)]
    flow.decode(z, Plan(tuple(methods)), watch=guess, warn=False, **condition)
    flow.decode(z, "sequential", watch=position, warn=False, **condition)
    order = flow.order(len(flow.blocks) - 1 - block)
    places = torch.arange(ends[0].shape[1])
    rank = places if order is None else torch.argsort(order.cpu())
    return Walk(block=block, swept=tuple(swept), start=ends[0], exact=ends[-1], rank=rank)


def finish(flow: Flow, seq: Tensor, block: int, **condition: Any) -> Tensor:
    """Data [N, ...] from sequences as `block` leaves them: the blocks after it, by sweeps."""
    method = Method(tol=flow.default_tol, init=flow.default_init, unit=flow.default_unit)
    with torch.no_grad():
        for later in flow.bound_blocks(len(seq), **condition)[block + 1 :]:
            seq = decode(later, seq, method).x
        return flow.from_sequence(seq)
