"""Backends: how bound blocks are evaluated. One is chosen when a block is bound, and stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from jacobiflow.core.arguments import word
from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.block import Block, Cache, Conditioner, Engine, Start, WrappedConditioner, take
from jacobiflow.core.hardware import has_bfloat16
from jacobiflow.core.rows import accept
from jacobiflow.kernels import c_masked, c_transformer
from jacobiflow.kernels.compile import compiled

Backend = Literal["torch", "c", "compile"]
Make = Callable[[Conditioner, Bijector], Engine | None]


@dataclass(frozen=True)
class TorchEngine(Engine):
    """Conditioner and bijector as they are: the reference that every other backend is tested against."""

    conditioner: Conditioner
    bijector: Bijector
    name: str = "torch"
    rows: int | None = None
    compacts: bool = True

    accept = staticmethod(accept)

    def select(self, rows: Tensor) -> TorchEngine:
        return replace(self, conditioner=self.conditioner.select(rows))

    def rough(self) -> TorchEngine | None:
        fast = self.compacts and has_bfloat16(self.conditioner.tensors()[0].device)
        return replace(self, conditioner=RoughConditioner(self.conditioner)) if fast else None

    def new_cache(self, n: int) -> Cache:
        return self.conditioner.new_cache(n)

    def first(self, x: Tensor, cache: Cache | None) -> Tensor:
        return self.conditioner.first(len(x))

    def params(self, x: Tensor, start: Start, width: int, cache: Cache | None) -> Tensor:
        if cache is None:
            return take(self.conditioner.all_params(x), start, width)
        return self.conditioner.params(x, start, width, cache)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.bijector.inverse(z, theta)


class RoughConditioner(WrappedConditioner):
    """A conditioner that multiplies in bfloat16. For whole sequences: it keeps nothing."""

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        return take(self.all_params(x), start, width)

    def all_params(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.inner.all_params(x).to(x.dtype)


def compile_engine(conditioner: Conditioner, bijector: Bijector) -> TorchEngine | None:
    """The torch engine over a compiled conditioner, if there is one."""
    found = compiled(conditioner)
    return None if found is None else TorchEngine(found, bijector, name="compile", compacts=False)


# By name: what makes its engines, each for other conditioners and bijectors; None declines.
C_ENGINES = c_transformer.engine, c_masked.engine
BACKENDS: dict[str, tuple[Make, ...]] = {"torch": (TorchEngine,), "c": C_ENGINES, "compile": (compile_engine,)}
FASTEST: tuple[str, ...] = ("c", "torch")  # the order in which they are tried when none is asked for


def bind(
    conditioner: Conditioner, bijector: Bijector, order: Tensor | None = None, backend: Backend | None = None
) -> Block:
    """A block that is evaluated by `backend`, or by the fastest one that supports it."""
    if backend is not None:
        word("backend", backend, BACKENDS)
    for name in FASTEST if backend is None else (backend,):
        for make in BACKENDS[name]:
            if (engine := make(conditioner, bijector)) is not None:
                return Block(conditioner, bijector, engine, order)
    raise ValueError(f"backend {backend!r} does not support this flow here: leave it out")
