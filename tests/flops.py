"""Multiplications counted by formula, not by a clock.

torch's own counter sees neither attention on the CPU nor products with vectors, so every operation
that multiplies matrices is listed here; an unlisted one that looks like a product is an error.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _mm(a: torch.Tensor, b: torch.Tensor) -> int:
    return math.prod(a.shape) * (b.shape[-1] if b.ndim > 1 else 1)


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> int:
    return math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


COUNTS = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.mv: _mm,
    aten.dot: lambda a, b: a.numel(),
    aten.addmm: lambda c, a, b: _mm(a, b),
    aten.addmv: lambda c, a, b: _mm(a, b),
    aten.baddbmm: lambda c, a, b: _mm(a, b),
    aten.matmul: _mm,
    aten.linear: lambda x, w, *b: x.numel() * w.shape[0],
    aten.scaled_dot_product_attention: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
}
SUSPICIOUS = ("mm", "mv", "matmul", "linear", "attention", "einsum", "conv", "bilinear")


class Flops(TorchDispatchMode):
    """with Flops() as count: ...; count.total"""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func.overloadpacket
        if packet in COUNTS:
            self.total += COUNTS[packet](*args)
        elif any(word in str(packet) for word in SUSPICIOUS):
            raise AssertionError(f"{packet} multiplies but is not counted")
        return func(*args, **(kwargs or {}))


def flops(run: Any) -> int:
    with Flops() as count:
        run()
    return count.total
