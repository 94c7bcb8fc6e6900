"""Samples that are not finite: which they are, and what to do about them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jacobiflow.core.results import nonfinite_rows
from jacobiflow.core.warn import warn_caller
from jacobiflow.flows.guidance import Guidance


def describe(lost: int, n: int, advice: str) -> str:
    """What is wrong and what to do, in one line."""
    return f"{lost:,} of {n:,} samples are not finite: {advice}"


def remedy(guidance: float | Guidance, dtype: torch.dtype) -> str:
    """What to do about samples whose noise is finite.

    >>> remedy(1000.0, torch.float32)
    'lower the guidance weight (it is 1000), try float64, or check the weights'
    >>> remedy(0.0, torch.float64)
    'check the weights'
    """
    weight = Guidance.of(guidance).weight
    steps = [f"lower the guidance weight (it is {weight:g})"] if weight else []
    steps += [] if dtype is torch.float64 else ["try float64"]
    return ", ".join([*steps, "or check the weights" if steps else "check the weights"])


def warn_of_nonfinite(x: Tensor, z: Tensor, guidance: float | Guidance) -> None:
    """One warning, at the caller's line, if samples x of noise z are not finite."""
    if math.isfinite(x.detach().sum()):  # nearly always the sum tells, in one pass
        return
    lost, noise = int(nonfinite_rows(x).sum()), int(nonfinite_rows(z).sum())
    advice = remedy(guidance, x.dtype)
    if noise:
        replace = f"replace the {noise} rows of z that are not finite"
        advice = replace if noise == lost else f"{replace}; for the others, {advice}"
    warn_caller(describe(lost, len(x), advice))
