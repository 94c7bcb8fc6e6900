"""A training step of the bundled recipes' models: float32 and bfloat16, each with both kinds of attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import jacobiflow as jf
from benchmarks.harness import Row, race
from jacobiflow.core.hardware import has_bfloat16
from jacobiflow.flows import transformer
from jacobiflow.training.recipe import Recipe
from jacobiflow.training.train import build_flow

ATTENTION = {
    "torch's attention": partial(F.scaled_dot_product_attention, is_causal=True),
    "attention in blocks": transformer.causal_attention,
}


def rows(repeats: int) -> list[Row]:
    """Seconds per step; a deviation is that of the loss from float32 with torch's attention."""
    found: list[Row] = []
    precisions = ("float32", "bfloat16") if has_bfloat16(torch.device("cpu")) else ("float32",)
    for name in ("mnist", "cifar10"):
        recipe = Recipe.load(name)
        torch.manual_seed(0)
        flow, size = build_flow(recipe.model), recipe.training.batch_size
        assert isinstance(flow, jf.TarFlow)
        x, labels = torch.randn(size, *flow.data_shape), torch.arange(size) % flow.num_classes
        runs: dict[str, Callable[[], Tensor]] = {
            f"{precision}, {kind}": partial(step, flow, x, labels, precision, kind)
            for precision in precisions
            for kind in ATTENTION
        }
        peer = next(iter(runs))
        found += race(peer, runs, runs[peer](), repeats, recipe=name, batch=size)
    return found


def step(flow: jf.Flow, x: Tensor, labels: Tensor, precision: str, kind: str) -> Tensor:
    """Forward and backward pass; the optimizer takes one percent of a step. Returns the loss."""
    flow.zero_grad(set_to_none=True)
    bf16 = torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16")
    with bf16, patch.object(transformer, "causal_attention", ATTENTION[kind]):
        loss, _ = flow.training_loss(x, labels, 1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()
