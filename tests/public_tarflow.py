"""Checkpoints in the layout of the public TarFlow code, with random weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Shape:
    width: int = 64
    patch: int = 2
    size: int = 6
    channels: int = 3
    blocks: int = 3
    layers: int = 2
    classes: int = 0
    preserving: bool = False

    @property
    def length(self):
        return (self.size // self.patch) ** 2

    @property
    def dim(self):
        return self.channels * self.patch**2


def public(s: Shape, seed=0, dtype=torch.float64):
    """A random state dict in the public layout, every weight away from its usual first value."""
    g = torch.Generator().manual_seed(seed)

    def rand(*shape, scale=1.0):
        return torch.randn(*shape, generator=g, dtype=torch.float64).mul_(scale)

    w, out = s.width, {}

    def linear(name, rows, cols, gain=1.0):
        out[f"{name}.weight"] = rand(rows, cols, scale=gain / math.sqrt(cols))
        out[f"{name}.bias"] = rand(rows, scale=0.1)

    def norm(name):
        out[f"{name}.weight"] = 1 + rand(w, scale=0.2)
        out[f"{name}.bias"] = rand(w, scale=0.2)

    for k in range(s.blocks):
        b = f"blocks.{k}"
        linear(f"{b}.proj_in", w, s.dim)
        out[f"{b}.pos_embed"] = rand(s.length, w)
        if s.classes:
            out[f"{b}.class_embed"] = rand(s.classes, 1, w)
        for i in range(s.layers):
            a = f"{b}.attn_blocks.{i}"
            norm(f"{a}.attention.norm")
            linear(f"{a}.attention.qkv", 3 * w, w, gain=1.5)
            linear(f"{a}.attention.proj", w, w)
            norm(f"{a}.mlp.norm")
            linear(f"{a}.mlp.main.0", 4 * w, w)
            linear(f"{a}.mlp.main.2", w, 4 * w)
        linear(f"{b}.proj_out", s.dim if s.preserving else 2 * s.dim, w, gain=0.15)
        out[f"{b}.attn_mask"] = torch.ones(s.length, s.length, dtype=torch.float64).tril()
    out["var"] = torch.ones(s.length, s.dim, dtype=torch.float64)
    if s.preserving:
        out["var"] = torch.exp(rand(s.length, s.dim, scale=0.5))
    return {key: value.to(dtype) for key, value in out.items()}
