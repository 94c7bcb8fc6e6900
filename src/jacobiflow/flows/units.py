"""What a masked network remembers."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from jacobiflow.core.bijectors import Compiled


class Units(ABC):
    """Hidden units of the first `valid` positions, for a fixed set of rows: a Cache."""

    valid: int = 0

    @abstractmethod
    def select(self, rows: Tensor) -> Units:
        """These rows in a cache of their own."""

    @abstractmethod
    def params(self, x: Tensor, lo: int, hi: int) -> Tensor:
        """theta [n, hi - lo, P] of positions lo .. hi - 1, all units that they see brought up to date."""

    def single(self, x: Tensor, z: Tensor, lo: int, hi: int, by: Compiled) -> Tensor | None:
        """Solve positions lo .. hi - 1 of x one after the other, in place; their slopes [n, hi - lo]. None
        where there is no function that does it."""
        return None
