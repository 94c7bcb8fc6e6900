"""How sweeps approach a block's exact answer, and how sequential decoding does."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.block import Block
from jacobiflow.core.decode import decode
from jacobiflow.core.method import Init, Method
from jacobiflow.core.results import Sweep
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.exact_blocks import Note, Record, exact_blocks

END_TOL, END_TOL_DOUBLE = 1e-6, 1e-10  # changes at which a curve ends: below is rounding, in float64 later
NEGLIGIBLE_ERROR = 1e-6  # relative to the first error; smaller ones say little about convergence


@dataclass(frozen=True, kw_only=True)
class Approach:
    """One block, step by step: |x - exact| (l2, mean over samples)."""

    length: int
    jacobi: tuple[float, ...]  # after 0, 1, 2, ... sweeps over the whole sequence
    sequential: tuple[float, ...]  # after 0, 1, 2, ... positions; the others hold the block's input

    @property
    def ratios(self) -> tuple[float, ...]:
        """Each error of the sweeps divided by the one before; falling ratios are superlinear convergence."""
        return tuple(b / a if a else math.nan for a, b in pairwise(self.jacobi))

    @property
    def ratio_falls(self) -> bool | None:
        """Whether the mean log ratio of the later half of the sweeps is below that of the earlier half.

        Neither the first sweep, whose gain depends on the guess alone, nor sweeps with a negligible error
        count. None: there are too few sweeps to tell.
        """
        floor = NEGLIGIBLE_ERROR * self.jacobi[0]
        logs = [math.log(b / a) for a, b in pairwise(self.jacobi[1:]) if a > 0 and b > floor]
        half = len(logs) // 2
        return sum(logs[half:]) / (len(logs) - half) < sum(logs[:half]) / half if half else None


@dataclass(frozen=True, kw_only=True)
class Convergence(Record):
    """The blocks, the one next to the noise first."""

    samples: int
    init: Init
    dtype: str
    blocks: tuple[Approach, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data for JSON, with the ratios."""
        doc = super().to_dict()
        for block, entry in zip(self.blocks, doc["blocks"], strict=True):
            entry["ratios"] = [r if math.isfinite(r) else None for r in block.ratios]
            entry["ratio_falls"] = block.ratio_falls
        return doc


def convergence(
    flow: Flow,
    z: Tensor,
    *,
    init: Init | None = None,
    double: bool = False,
    tol: float | None = None,
    progress: Note = lambda text: None,
    **condition: Any,
) -> Convergence:
    """Errors in each block, given its exact input: ||x^t - x*||_2 of each sweep t.

    The sequential curve is the paper's: positions that are not solved yet hold the block's input.
    double: in float64, on a copy of the flow, so that curves do not end in rounding.
    tol: the change at which a sample's curve ends. Default: what the dtype can resolve.
    condition: see `exact_blocks`.
    """
    if double and z.dtype != torch.float64:
        flow, z = copy.deepcopy(flow).double(), z.double()
        if isinstance(condition.get("context"), Tensor):
            condition["context"] = condition["context"].double()
    init = flow.inits[0] if init is None else init
    if tol is None:
        tol = END_TOL_DOUBLE if z.dtype == torch.float64 else END_TOL
    method = Method(tol=tol, init=init, unit=flow.default_unit)
    blocks = []
    for i, exact in enumerate(exact_blocks(flow, z, **condition)):
        progress(f"block {i + 1} of {len(flow.blocks)}")
        blocks.append(approach(*exact, method))
    dtype = str(z.dtype).removeprefix("torch.")
    return Convergence(samples=len(z), init=init, dtype=dtype, blocks=tuple(blocks))


def approach(block: Block, z: Tensor, exact: Tensor, method: Method) -> Approach:
    """One block's curves from its input to its exact output; `method` sweeps the whole sequence."""
    jacobi: list[float] = []

    def measure(sweep: Sweep) -> None:
        jacobi.append(float((sweep.x - exact).flatten(1).norm(dim=1).nanmean()))

    decode(block, z, method, on_failure="return", watch=measure)
    squares = block.to_positions((z - exact).square().sum(2))  # [N, T]
    left = squares.flip(1).cumsum(1).flip(1)[:, 1:].sqrt().nanmean(0)  # error of the positions after each
    sequential = (*left.tolist(), 0.0)
    return Approach(length=block.length, jacobi=tuple(jacobi) or (math.nan,), sequential=sequential)
