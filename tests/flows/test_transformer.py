"""The transformer in torch: attention in training beside torch's own kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import jacobiflow as jf
from jacobiflow.flows import transformer
from jacobiflow.flows.transformer import QUERIES, causal_attention


@pytest.mark.parametrize("length", [2, QUERIES - 1, QUERIES, QUERIES + 1, 2 * QUERIES + 40])
def test_causal_attention_in_blocks_is_torchs(length: int) -> None:
    """Values and gradients, also where the last block of queries is short."""
    qkv = torch.randn(3, 2, 3, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weight = torch.linspace(-1, 1, 8, dtype=torch.float64)

    def values_and_gradients(fused: bool) -> tuple[Tensor, ...]:
        q, k, v = (t.clone().requires_grad_() for t in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True) if fused else causal_attention(q, k, v)
        return out, *torch.autograd.grad((out * weight).sum(), (q, k, v))

    for ours, theirs in zip(values_and_gradients(False), values_and_gradients(True), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-13)


def test_training_takes_it_and_encoding_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[int]()

    def counted(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append(q.shape[2])
        return causal_attention(q, k, v)

    monkeypatch.setattr(transformer, "causal_attention", counted)
    config = jf.TarFlowConfig(image_size=8, image_channels=1, patch_size=2, width=64, blocks=2, layers_per_block=2)
    flow, x = jf.TarFlow(config), torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        flow.encode(x)
    assert not calls
    flow.training_loss(x, None, 1e-4)
    assert calls == [config.length - 1] * 4
