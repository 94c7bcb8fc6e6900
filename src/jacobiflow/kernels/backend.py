"""Backends: how bound blocks are evaluated. One is chosen when a block is bound, and stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor

from jacobiflow.core.arguments import word
from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.block import Block, Conditioner, Engine
from jacobiflow.kernels import c_masked, c_transformer, compile
from jacobiflow.kernels.torch_reference import TorchEngine

Backend = Literal["torch", "c", "compile"]
# By name: what makes its engines, each for other conditioners and bijectors; None declines.
BACKENDS: dict[str, tuple[Callable[[Conditioner, Bijector], Engine | None], ...]] = {
    "torch": (TorchEngine,),
    "c": (c_transformer.engine, c_masked.engine),
    "compile": (compile.engine,),
}
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
