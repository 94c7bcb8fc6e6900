"""Peers to measure against, on the same weights as our models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jacobiflow as jf


@torch.inference_mode()
def plain_tarflow(flow: jf.TarFlow, z: Tensor, labels: Tensor | None = None) -> Tensor:
    """Sequential decoding as the public code does it: one position a step, keys and values concatenated.

    torch's attention and no cost beyond the concatenation.
    """
    x = z * flow.var.sqrt()
    for k in reversed(range(len(flow.blocks))):
        x = x.flip(1) if k % 2 else x
        x = _plain_block(flow.blocks[k], x, labels)
        x = x.flip(1) if k % 2 else x
    return flow.from_sequence(x)


def _plain_block(block: nn.Module, z: Tensor, labels: Tensor | None) -> Tensor:
    n, length, _ = z.shape
    keys: list[Tensor | None] = [None] * len(block.net.layers)
    values = list(keys)
    condition = block.bind(labels).condition
    x = z.clone()
    for t in range(length - 1):
        h = block.proj_in(x[:, t : t + 1]) + block.pos_embed[t : t + 1]
        if condition is not None:
            h = h + condition
        for i, layer in enumerate(block.net.layers):
            qkv = layer.qkv(layer.norm1(h)).view(n, 1, 3 * layer.heads, layer.head_dim).transpose(1, 2)
            q, k, v = qkv.chunk(3, dim=1)
            keys[i] = k if keys[i] is None else torch.cat((keys[i], k), dim=2)
            values[i] = v if values[i] is None else torch.cat((values[i], v), dim=2)
            out = F.scaled_dot_product_attention(q, keys[i], values[i])
            h = h + layer.proj(out.transpose(1, 2).reshape(n, 1, -1))
            h = h + layer.down(F.gelu(layer.up(layer.norm2(h))))
        a, b = block.proj_out(h)[:, 0].chunk(2, dim=-1)
        x[:, t + 1] = z[:, t + 1] * a.exp() + b
    return x


class NflowsMAF(nn.Module):
    """Our MAF's weights in nflows' transforms; `inverse` is nflows' own."""

    def __init__(self, flow: jf.MAF) -> None:
        super().__init__()
        from nflows.transforms import MaskedAffineAutoregressiveTransform

        config = flow.config
        assert config.transform == "affine"
        assert config.scale == "softplus"
        assert not config.residual
        assert not config.context
        self.transforms = nn.ModuleList()
        self.orders = [flow.order(k) for k in range(config.blocks)]
        for net in flow.blocks:
            transform = MaskedAffineAutoregressiveTransform(
                features=config.features,
                hidden_features=config.hidden[0],
                num_blocks=len(config.hidden) - 1,
                use_residual_blocks=False,
                activation=net.activation,
            )
            transform._epsilon = config.min_scale
            made = transform.autoregressive_net
            theirs = [made.initial_layer, *(b.linear for b in made.blocks), made.final_layer]
            masks = [net.get_buffer(f"mask{i}") for i in range(len(net.linears))] + [net.head_mask]
            for layer, ours, mask in zip(theirs, [*net.linears, net.head], masks, strict=True):
                layer.weight.data.copy_(ours.weight.data)
                layer.bias.data.copy_(ours.bias.data)
                layer.mask.copy_(mask)
            self.transforms.append(transform)

    @torch.inference_mode()
    def inverse(self, z: Tensor) -> Tensor:
        """Samples for noise z [N, D], by D full passes a block."""
        x = z
        for transform, order in zip(reversed(self.transforms), reversed(self.orders), strict=True):
            x = x if order is None else x[:, order]
            x, _ = transform.inverse(x)
            x = x if order is None else x[:, torch.argsort(order)]
        return x
