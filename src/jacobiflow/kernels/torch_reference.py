"""The torch backend: the reference that every other backend is tested against. It evaluates anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.block import Cache, Conditioner, Engine, Start, WrappedConditioner, take
from jacobiflow.core.rows import accept
from jacobiflow.kernels.build import processor_flags


@dataclass(frozen=True)
class TorchEngine:
    """Conditioner and bijector as they are."""

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

    def params(self, x: Tensor, start: Start, width: int, cache: Cache | None) -> Tensor:
        if cache is None:
            return take(self.conditioner.all_params(x), start, width)
        return self.conditioner.params(x, start, width, cache)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.bijector.inverse(z, theta)

    def solve(
        self, x: Tensor, z: Tensor, log_slope: Tensor, start: int, stop: int, cache: Cache | None
    ) -> None:
        solve_by_steps(self, x, z, log_slope, start, stop, cache)


class RoughConditioner(WrappedConditioner):
    """A conditioner that multiplies in bfloat16. For whole sequences: it keeps nothing."""

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        return take(self.all_params(x), start, width)

    def all_params(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.inner.all_params(x).to(x.dtype)


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device has instructions for products in bfloat16."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and "bf16" in processor_flags()


def solve_by_steps(
    engine: Engine, x: Tensor, z: Tensor, log_slope: Tensor, start: int, stop: int, cache: Cache | None
) -> None:
    """`Engine.solve` for any engine, by its other methods."""
    for t in range(start, stop):
        new, slope = engine.inverse(z[:, t : t + 1], engine.params(x, t, 1, cache))
        x[:, t : t + 1], log_slope[:, t] = new, slope.sum((1, 2))
