"""The paper's decoders in a few lines each: what the loop is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core.rows import first_guess


def algorithm_1(block: jf.Block, z: Tensor, tol: float, init: str) -> tuple[Tensor, int]:
    """Algorithm 1 of the paper for one sample, its first position in place; the answer and its sweeps."""
    first = block.from_positions(torch.arange(block.length)[None]) == 0  # [1, T], in the order of the data
    x = first_guess(z, init)
    for count in range(block.length):
        new, _ = block.sweep(x, z)
        if count == 0:  # the first position reads no other: it is known before the first sweep
            x = torch.where(first[..., None], new, x)
            continue
        change, x = (new - x).abs().max().item(), new
        if change <= tol:
            return x, count
    return x, block.length - 1


def one_position_at_a_time(block: jf.Block, z: Tensor) -> tuple[Tensor, Tensor]:
    """Sequential decoding without a cache: x [n, T, D] and log |dx/dz| [n]."""
    z = block.to_positions(z)
    x, log_det = torch.zeros_like(z), z.new_zeros(len(z))
    for t in range(block.length):
        theta = block.conditioner.all_params(x)[:, t : t + 1]
        new, log_slope = block.bijector.inverse(z[:, t : t + 1], theta)
        x[:, t : t + 1], log_det = new, log_det + log_slope.sum((1, 2))
    return block.from_positions(x), log_det
