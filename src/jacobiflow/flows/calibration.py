"""Calibrated first guesses: x_t = mean_t + slope_t z_t per block, position and dimension, fitted to exact answers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jacobiflow.core.block import Guess
from jacobiflow.core.decode import decode
from jacobiflow.core.files import write_atomically
from jacobiflow.core.method import Method

if TYPE_CHECKING:
    from jacobiflow.flows.flow import Flow

FILE = "guess.safetensors"
NOISES = 300  # more do not improve the fit
FEWEST_NOISES = 32  # fewer make a worse guess than the block's input
SEED = 2**31 - 2  # of the noise that guesses are fitted on


@dataclass(frozen=True)
class Calibration:
    """First guesses of all blocks in sampling order, in the order of positions; bound to some weights."""

    mean: Tensor  # [blocks, T, D]
    slope: Tensor  # [blocks, T, D]
    weights: str  # their fingerprint

    def save(self, folder: Path) -> None:
        tensors, header = {"mean": self.mean, "slope": self.slope}, {"weights": self.weights}
        write_atomically(folder / FILE, lambda path: save_file(tensors, path, metadata=header))

    @classmethod
    def load(cls, folder: Path, shape: tuple[int, ...]) -> Calibration | None:
        """What `save` wrote, if it is there and fits a flow of this shape [blocks, T, D]."""
        try:
            with safe_open(folder / FILE, framework="pt") as f:
                mean, slope = (f.get_tensor(name).float() for name in ("mean", "slope"))
                weights = (f.metadata() or {}).get("weights", "")
        except (OSError, SafetensorError):
            return None
        fits = mean.shape == slope.shape == shape and bool((mean.isfinite() & slope.isfinite()).all())
        return cls(mean, slope, weights) if fits else None


@torch.no_grad()
def calibrate(
    flow: Flow, *, noises: int = NOISES, seconds: float = math.inf, progress: Callable[[str], None] = lambda _: None
) -> None:
    """Fit the first guesses of a flow and give them to it, as `flow.calibration`.

    Flows that need context keep the default guess, and so do those too slow for a fit in about so many `seconds`.
    """
    if flow.context_features:
        return
    if seconds < math.inf:
        probe = flow.noise(2, SEED)
        flow.decode(probe, "sequential", warn=False)  # pays for what a flow makes at its first use
        took = flow.decode(probe, "sequential", warn=False).stats.seconds
        noises = min(noises, int(seconds * len(probe) / took))
    if noises < FEWEST_NOISES:
        return
    blocks = flow.bound_blocks(noises, labels=flow.every_label(noises))
    z, lines = flow.to_prior(flow.noise(noises, SEED)), []
    for i, block in enumerate(blocks):
        progress(f"first guess of block {i + 1} of {len(blocks)}")
        x = decode(block, z, Method(width=1)).x
        lines.append(fit_line(block.to_positions(z), block.to_positions(x)))
        z = x
    mean, slope = (torch.stack(tensors).float().cpu() for tensors in zip(*lines, strict=True))
    flow.calibration = Calibration(mean, slope, flow.fingerprint())


def fit_line(z: Tensor, x: Tensor) -> Guess:
    """mean and slope [T, D] of the least-squares fit x = mean + slope z over finite samples [n, T, D].

    >>> z = torch.tensor([[[1.0]], [[2.0]], [[4.0]]])
    >>> [round(float(t), 6) for t in fit_line(z, 3 * z + 1)]
    [1.0, 3.0]
    """
    finite = (x.isfinite() & z.isfinite()).flatten(1).all(1)
    z, x = z[finite].double(), x[finite].double()
    if len(z) < 2:
        return z.new_zeros(z.shape[1:]), z.new_ones(z.shape[1:])
    z_mean, x_mean = z.mean(0), x.mean(0)
    covariance = ((z - z_mean) * (x - x_mean)).mean(0)
    slope = covariance / (z - z_mean).square().mean(0).clamp_min(torch.finfo(z.dtype).tiny)
    return x_mean - slope * z_mean, slope
