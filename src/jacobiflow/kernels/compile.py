"""The torch.compile backend: a conditioner's own `params`, compiled once per number of rows and width of window."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from jacobiflow.core.block import Cache, Conditioner, Start, WrappedConditioner
from jacobiflow.core.progress import announce

# By exact type: the same conditioner with its network compiled, or None. Modules that define conditioners add them.
COMPILED: dict[type[Any], Callable[[Any], Conditioner | None]] = {}


def compiled(conditioner: Conditioner) -> Conditioner | None:
    """The conditioner with its network compiled, if its type allows that."""
    return COMPILED.get(type(conditioner), lambda _: None)(conditioner)


class StaticConditioner(WrappedConditioner):
    """A conditioner whose `params` is compiled, with starts as a tensor: one graph serves all frontiers and blocks."""

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        size = min(1 << (width - 1).bit_length(), self.length - 1)  # few widths are compiled
        starts, skip = start, 0
        if isinstance(start, int):  # final positions before it fill the bucket, and come out as they were
            begin = max(start - (size - width), 1)
            starts, skip = torch.full((len(x),), begin, device=x.device), start - begin
        own = x.clone(memory_format=torch.contiguous_format)  # its strides are part of the compiled code
        # What torch compiles for, apart from values:
        kinds = tuple((t.shape, t.dtype, t.device, t.requires_grad, t.is_inference()) for t in (own, *self.tensors()))
        theta = step(x.device.type, size, kinds)(self.inner, own, starts, size, cache)
        return theta[:, skip : skip + width].clone()  # a CUDA graph writes its next results to the same place

    def all_params(self, x: Tensor) -> Tensor:
        first, rest = self.first(len(x)), self.length - 1
        return torch.cat((first, self.params(x, 1, rest, self.new_cache(len(x)))), 1) if rest else first


@cache
def step(device: str, width: int, signature: tuple[Any, ...]) -> Callable[..., Tensor]:
    """A conditioner's `params`, compiled for one kind of device and one set of shapes."""
    announce("torch compiles the network, once per batch size and width: this takes up to a minute")

    def evaluate(conditioner: Conditioner, x: Tensor, start: Tensor, width: int, cache: Cache) -> Tensor:
        return conditioner.params(x, start, width, cache)

    # Each has code of its own: torch counts compilations per code object, and gives up at the eighth.
    own = FunctionType(evaluate.__code__.replace(), globals(), f"evaluate_{width}")
    return torch.compile(own, dynamic=False, fullgraph=True, **options(device))


def options(device: str) -> dict[str, Any]:
    """How torch compiles for a kind of device; "reduce-overhead" is CUDA graphs."""
    return {"mode": "reduce-overhead"} if device == "cuda" else {}
