"""Small stand-ins: for metrics, and for transforms of packages that cannot be installed here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from nflows.transforms.autoregressive import AutoregressiveTransform
from nflows.transforms.made import MADE
from torch import Tensor

import jacobiflow as jf
from subjects import tarflow


class Tiny:
    """Mean grey of 12 fields: a network of features that costs nothing, and counts what it sees."""

    version, num_features = "tiny", 12

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, pixels: Tensor) -> Tensor:
        self.seen += len(pixels)
        grey = pixels.float().mean(1, keepdim=True) / 255
        return torch.nn.functional.adaptive_avg_pool2d(grey, (3, 4)).flatten(1)


def image_flow() -> jf.Flow:
    """A perturbed class-conditional flow of grey 16 x 16 images, with noise of training to remove."""
    small = {"width": 16, "head_dim": 8, "blocks": 2, "layers_per_block": 1}
    return tarflow(0.1, image_size=16, patch_size=4, num_classes=3, **small)


def make_clip(folder: Path) -> None:
    """A CLIP of random weights in the format of transformers: config, weights, tokenizer, processor."""
    import transformers

    letters = [chr(c) for c in range(97, 123)] + ["."]
    words = [*letters, *(f"{c}</w>" for c in letters), "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.CLIPTokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": len(words), "max_position_embeddings": 32, **size, **ends},
        vision_config={"image_size": 24, "patch_size": 8, **size},
        projection_dim=8,
    )
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    sides = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}}
    images = transformers.CLIPImageProcessor(**sides)
    transformers.CLIPProcessor(images, tokenizer).save_pretrained(folder)


class MonotonicIntegral(torch.nn.Module):
    """z = h_0 + the integral of a positive network from 0 to x, inverted by bisection, as in UMNN."""

    def __init__(self, conditions: int, steps: int = 20) -> None:
        super().__init__()
        nn = torch.nn
        self.net = nn.Sequential(nn.Linear(conditions, 16), nn.ReLU(), nn.Linear(16, 1), nn.ELU())
        nodes, weights = np.polynomial.legendre.leggauss(steps)
        self.register_buffer("nodes", torch.tensor(nodes, dtype=torch.float32))
        self.register_buffer("weights", torch.tensor(weights, dtype=torch.float32))

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """x [n, T], h [n, T, C] -> z [n, T] and dz/dx [n, T]."""

        def slope(at: Tensor) -> Tensor:
            given = h[..., None, 1:].expand(*at.shape, -1)
            return self.net(torch.cat((at[..., None], given), -1))[..., 0] + 1.05

        at = 0.5 * x[..., None] * (self.nodes + 1)
        z = h[..., 0] + 0.5 * x * (slope(at) * self.weights).sum(-1)
        return z, slope(x[..., None])[..., 0]

    def inverse_transform(self, z: Tensor, h: Tensor) -> Tensor:
        low, high = torch.full_like(z, -20), torch.full_like(z, 20)
        for _ in range(25):
            middle = (low + high) / 2
            left = self.forward(middle, h)[0] > z
            low, high = torch.where(left, low, middle), torch.where(left, middle, high)
        return (low + high) / 2


class UMNNTransform(AutoregressiveTransform):
    """The structure of nflows' MaskedUMNNAutoregressiveTransform, which its releases do not have."""

    def __init__(self, features: int, hidden_features: int, context_features: int | None = None) -> None:
        super().__init__(MADE(features, hidden_features, context_features, output_multiplier=5))
        self.features, self.cond_size = features, 5
        self.transformer = MonotonicIntegral(5)

    def _output_dim_multiplier(self) -> int:
        return self.cond_size

    def _elementwise_forward(self, inputs: Tensor, autoregressive_params: Tensor) -> tuple[Tensor, Tensor]:
        z, slope = self.transformer(inputs, autoregressive_params.view(*inputs.shape, -1))
        return z, slope.log().sum(1)

    def _elementwise_inverse(self, inputs: Tensor, autoregressive_params: Tensor) -> tuple[Tensor, Tensor]:
        h = autoregressive_params.view(*inputs.shape, -1)
        x = self.transformer.inverse_transform(inputs, h)
        return x, -self.transformer(x, h)[1].log().sum(1)
