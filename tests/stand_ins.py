"""Small stand-ins for metrics: a feature network, a flow of images, a CLIP."""

from __future__ import annotations

import json
from pathlib import Path

import torch
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
