"""How sweeps approach a block's exact answer, and how one position a step does."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.decode import decode
from jacobiflow.core.types import Init, Method, Sweep
from jacobiflow.flows.flow import Flow
from jacobiflow_lab.analysis.layers import Layer, exact_layers, plain

TOL = {torch.float64: 1e-10}  # updates at which a curve ends; below it is rounding
LOOSE = 1e-6  # in any other dtype
SHARE = 1e-6  # of the first error: what lies below says little about how sweeps converge


@dataclass(frozen=True, kw_only=True)
class Approach:
    """One block, step by step: |x - exact| (l2, mean over samples)."""

    length: int
    jacobi: tuple[float, ...]  # after 0, 1, 2, ... sweeps over the whole sequence
    sequential: tuple[float, ...]  # after 0, 1, 2, ... positions; the rest stands at the block's input

    @property
    def ratios(self) -> tuple[float, ...]:
        """Each error of the sweeps over the one before: below 1 they gain, towards 0 ever faster."""
        return tuple(b / a if a else math.nan for a, b in pairwise(self.jacobi))

    @property
    def ratio_falls(self) -> bool | None:
        """Whether the later half of the sweeps gains more, by the mean of log ratios, than the earlier half.

        Sweeps below a millionth of the first error do not count. None: there are too few to tell.
        """
        first = self.jacobi[0]
        logs = [
            math.log(b / a) for a, b in pairwise(self.jacobi) if a > 0 and b > SHARE * first and first > 0
        ]
        half = len(logs) // 2
        return sum(logs[half:]) / (len(logs) - half) < sum(logs[:half]) / half if half else None


@dataclass(frozen=True, kw_only=True)
class Convergence:
    """The blocks, the one next to the noise first."""

    samples: int
    init: Init
    dtype: str
    blocks: tuple[Approach, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the ratios."""
        doc = plain(self)
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
    progress: Callable[[str], None] = lambda _: None,
    **condition: Any,
) -> Convergence:
    """The approach in each block, given its exact input: ||x^t - x*||_2 of each sweep t.

    The sequential curve is the paper's: positions not yet inferred stand at the block's input.
    double: in float64, on a copy of the flow, so that curves do not end in rounding.
    tol: the update at which a sample's curve is at its end; None is what the dtype can tell apart.
    condition: see `exact_layers`.
    """
    if double and z.dtype != torch.float64:
        flow, z = copy.deepcopy(flow).double(), z.double()
        condition = {k: v.double() if _floats(v) else v for k, v in condition.items()}
    init = flow.default_init if init is None else init
    tol = TOL.get(z.dtype, LOOSE) if tol is None else tol
    method = Method(tol=tol, init=init, unit=flow.default_unit)
    found = []
    for i, layer in enumerate(exact_layers(flow, z, **condition)):
        progress(f"block {i + 1} of {len(flow.blocks)}")
        found.append(approach(layer, method))
    return Convergence(
        samples=len(z), init=init, dtype=str(z.dtype).removeprefix("torch."), blocks=tuple(found)
    )


def approach(layer: Layer, method: Method) -> Approach:
    """One block's curves; `method` sweeps the whole sequence."""
    jacobi: list[float] = []

    def see(sweep: Sweep) -> None:
        jacobi.append(float((sweep.x - layer.x).flatten(1).norm(dim=1).nanmean()))

    decode(layer.block, layer.z, method, on_failure="return", watch=see)
    squares = layer.block.to_positions((layer.z - layer.x).square().sum(2))  # [N, T]
    left = squares.flip(1).cumsum(1).flip(1)[:, 1:].sqrt().nanmean(0)  # of the positions after each
    return Approach(
        length=layer.block.length, jacobi=tuple(jacobi) or (math.nan,), sequential=(*left.tolist(), 0.0)
    )


def _floats(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
