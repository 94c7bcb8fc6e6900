"""Sequential decoding as public code has it: what the paper's speed-ups are relative to."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.core.bijectors import description
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.tarflow import TarFlow

PLAIN = "plain loop"  # its name beside those of plans


def has_plain_loop(flow: Flow, guidance: Guidance) -> bool:
    """Whether `plain_tarflow` decodes this flow."""
    return type(flow) is TarFlow and not flow.config.volume_preserving and not guidance.weight


@torch.inference_mode()
def plain_tarflow(flow: Flow, z: Tensor, labels: Tensor | None = None) -> Tensor:
    """Sequential decoding as the public code does it: one position per step, keys and values concatenated.

    It uses torch's attention, and has no cost beyond the concatenation. A flow whose network is not the
    standard transformer is refused.
    """
    if description(flow.bind(0, len(z), None, Guidance())[0]) is None:
        raise ValueError("the plain loop knows the standard transformer of TarFlow only: compare with 'sequential'")
    labels = None if labels is None else labels.to(z.device)
    x = z * flow.get_buffer("var").sqrt()
    for k in reversed(range(len(flow.blocks))):
        x = x.flip(1) if k % 2 else x
        x = _plain_block(flow.blocks[k], x, labels)
        x = x.flip(1) if k % 2 else x
    return flow.from_sequence(x)


def _plain_block(block: Any, z: Tensor, labels: Tensor | None) -> Tensor:
    kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values by layer

    def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if i in kept:
            k, v = (torch.cat(pair, dim=2) for pair in zip(kept[i], (k, v), strict=True))
        kept[i] = k, v
        return F.scaled_dot_product_attention(q, k, v)

    x, condition = z.clone(), block.condition(labels)
    for t in range(z.shape[1] - 1):
        h = block.proj_in(x[:, t : t + 1]) + block.pos_embed[t : t + 1]
        h = h if condition is None else h + condition
        theta = block.proj_out(block.net(h, attend))
        x[:, t + 1 : t + 2], _ = block.bijector.inverse(z[:, t + 1 : t + 2], theta)
    return x
