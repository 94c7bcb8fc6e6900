"""What decoded samples are checked for: numbers that are not finite, and the residual |encode(x) - z|."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from jacobiflow.core.results import LARGE, BlockStats, Status, nonfinite_rows, warn_caller
from jacobiflow.flows.guidance import Guidance

PROBES = 4  # samples whose residual is looked at where tol is given by hand


def describe(lost: int, n: int, advice: str) -> str:
    """What is wrong and what to do, in one line."""
    return f"{lost:,} of {n:,} samples are not finite: {advice}"


def remedy(guidance: float | Guidance, dtype: torch.dtype) -> str:
    """What to do about samples whose noise is finite."""
    weight = Guidance.of(guidance).weight
    steps = [f"lower the guidance weight (it is {weight:g})"] if weight else []
    steps += [] if dtype is torch.float64 else ["try float64"]
    return ", ".join([*steps, "or check the weights" if steps else "check the weights"])


def warn_of_nonfinite(x: Tensor, z: Tensor, guidance: float | Guidance) -> None:
    """One warning, at the caller's line, if samples x of noise z are not finite."""
    lost = 0 if math.isfinite(x.detach().sum()) else int(nonfinite_rows(x).sum())  # the sum takes one pass
    if not lost:
        return
    noise, advice = int(nonfinite_rows(z).sum()), remedy(guidance, x.dtype)
    if noise:
        first = f"replace the {noise} rows of z that are not finite"
        advice = first if noise == lost else f"{first}; for the others, {advice}"
    warn_caller(describe(lost, len(x), advice))


def warn_if_loose(tol: float, residual: Tensor) -> None:
    """One warning, at the caller's line, if residuals |encode(x) - z| of samples [n, ...] are large."""
    largest = float(residual.nan_to_num(0.0, posinf=0.0).max())
    if largest > LARGE:
        what = f"tol {tol:g} is loose for this flow, |encode(x) - z| reaches {largest:.2g} in {len(residual)} samples"
        warn_caller(f"{what}: lower tol, or use plan auto, which keeps max_deviation")


def checked(blocks: Sequence[BlockStats], z: Tensor, again: Tensor) -> tuple[tuple[BlockStats, ...], Tensor]:
    """The stats of z [N, ...], and the residual max |again - z| [N].

    A sample that is EXACT in all blocks becomes CONVERGED in all of them, with one warning, if its residual
    exceeds sqrt(eps) * max(1, |z|) anywhere.
    """
    off = (again - z).abs().flatten(1)
    residual = off.amax(1)
    bound = math.sqrt(torch.finfo(z.dtype).eps) * z.abs().clamp_min(1).flatten(1)
    large = (~(off <= bound).all(1)).nonzero()[:, 0].tolist()
    wrong = {i for i in large if all(b.status[i] is Status.EXACT for b in blocks)}
    if not wrong:
        return tuple(blocks), residual
    what = f"{len(wrong)} of {len(z)} samples that ended EXACT have residuals up to"
    warn_caller(f"{what} {float(residual[list(wrong)].max()):.1e} and are reported as CONVERGED: decode in float64")
    ends = [tuple(Status.CONVERGED if i in wrong else s for i, s in enumerate(b.status)) for b in blocks]
    return tuple(replace(b, status=status) for b, status in zip(blocks, ends, strict=True)), residual
