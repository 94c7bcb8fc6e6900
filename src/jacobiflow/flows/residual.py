"""The residual |encode(x) - z| of decoded samples, and what it says about their status."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jacobiflow.core.results import BlockStats, Status
from jacobiflow.core.warn import warn_caller

LARGE = 0.25  # standard deviations of the noise; images then look different from exact ones
PROBES = 4  # samples that are looked at


def warn_if_loose(tol: float, z: Tensor, again: Tensor) -> None:
    """One warning, at the caller's line, if residuals |again - z| of samples of z [n, ...] are large."""
    largest = float((again - z).abs().nan_to_num(0.0, posinf=0.0).max())
    if largest > LARGE:
        warn_caller(
            f"tol {tol:g} is loose for this flow, |encode(x) - z| reaches {largest:.2g} in {len(z)} samples: "
            "lower tol, or leave it out and use max_deviation"
        )


def checked(blocks: Sequence[BlockStats], z: Tensor, again: Tensor) -> tuple[tuple[BlockStats, ...], Tensor]:
    """The stats of z [N, ...] as far as the residual bears them out, and the residual max |again - z| [N].

    A sample that is EXACT in all blocks becomes CONVERGED in all of them, with one warning, if its residual
    exceeds sqrt(eps) * max(1, |z|) anywhere: the residual does not tell which block is inexact.
    """
    off = (again - z).abs().flatten(1)
    residual = off.amax(1) if off.shape[1] else off.new_zeros(len(z))
    bound = math.sqrt(torch.finfo(z.dtype).eps) * z.abs().clamp_min(1).flatten(1)
    large = (~(off <= bound).all(1)).nonzero()[:, 0].tolist()
    wrong = [i for i in large if all(b.status[i] is Status.EXACT for b in blocks)]
    if not wrong:
        return tuple(blocks), residual
    warn_caller(
        f"{len(wrong)} of {len(z)} samples that ended EXACT have residuals up to "
        f"{float(residual[wrong].max()):.1e} and are reported as CONVERGED: decode in float64"
    )
    return tuple(_downgraded(block, wrong) for block in blocks), residual


def _downgraded(block: BlockStats, samples: Sequence[int]) -> BlockStats:
    status = list(block.status)
    for i in samples:
        status[i] = Status.CONVERGED
    return replace(block, status=tuple(status))
