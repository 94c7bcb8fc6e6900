"""The torch backend: the reference that every other backend is tested against. It evaluates anything."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jacobiflow.core.bijectors import Bijector
from jacobiflow.core.block import Cache, Conditioner, Engine, Start, WrappedConditioner, take
from jacobiflow.core.hardware import has_bfloat16
from jacobiflow.core.rows import accept


@dataclass(frozen=True)
class TorchEngine(Engine):
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


class RoughConditioner(WrappedConditioner):
    """A conditioner that multiplies in bfloat16. For whole sequences: it keeps nothing."""

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        return take(self.all_params(x), start, width)

    def all_params(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.inner.all_params(x).to(x.dtype)
