"""The guesses of one block from the first one to its answer, shown as what the whole flow makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.decode import decode
from jacobiflow.core.method import Method, Plan
from jacobiflow.core.results import Sweep
from jacobiflow.flows.flow import Flow


@dataclass(frozen=True, kw_only=True)
class Walk:
    """A few samples in one block; sequences [N, T, D] are in the order of the data."""

    block: int  # in sampling order
    swept: tuple[Tensor, ...]  # after 0, 1, 2, ... sweeps
    start: Tensor  # the block's input, with the first position known
    exact: Tensor
    rank: Tensor  # [T], the step in which sequential decoding solves each position

    @property
    def length(self) -> int:
        """Positions per sequence."""
        return len(self.rank)

    def after_positions(self, steps: int) -> Tensor:
        """Sequential decoding after this many steps; the first position is given."""
        known = (self.rank <= steps).to(self.exact.device)
        return torch.where(known[:, None], self.exact, self.start)


def walk(flow: Flow, z: Tensor, block: int, plan: Plan, **condition: Any) -> Walk:
    """How `plan` solves one block of z; where it is sequential, by sweeps over the whole sequence.

    condition: labels, context and guidance, as `Flow.decode` takes them.
    """

    def guesses(methods: Plan) -> list[Tensor]:
        """The block's sequence after every sweep."""
        found: list[Tensor] = []

        def keep(sweep: Sweep) -> None:
            if sweep.block == block:
                found.append(sweep.x)

        flow.decode(z, methods, watch=keep, warn=False, **condition)
        return found

    swept = Method(tol=flow.default_tol, init=flow.inits[0])
    methods = tuple(swept if i == block and m.width == 1 else m for i, m in enumerate(plan))
    exact = guesses(flow.plan("sequential"))
    bound = flow.bound_blocks(len(z), **condition)[block]
    rank = bound.from_positions(torch.arange(bound.length)[None])[0]
    return Walk(block=block, swept=tuple(guesses(Plan(methods))), start=exact[0], exact=exact[-1], rank=rank)


def finish(flow: Flow, seq: Tensor, block: int, **condition: Any) -> Tensor:
    """Data [N, ...] from sequences as `block` leaves them: the blocks after it, by sweeps."""
    method = Method(tol=flow.default_tol, init=flow.inits[0], unit=flow.default_unit)
    with torch.no_grad():
        for later in flow.bound_blocks(len(seq), **condition)[block + 1 :]:
            seq = decode(later, seq, method).x
        return flow.from_sequence(seq)
