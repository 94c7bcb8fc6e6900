"""Peers to measure against, on the same weights as our models."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import jacobiflow as jf


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
        """Samples for noise z [N, D], by D full passes per block."""
        x = z
        for transform, order in zip(reversed(self.transforms), reversed(self.orders), strict=True):
            x = x if order is None else x[:, order]
            x, _ = transform.inverse(x)
            x = x if order is None else x[:, torch.argsort(order)]
        return x
