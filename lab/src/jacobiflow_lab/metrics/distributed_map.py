"""Work on numbered items, in batches, on one process or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from jacobiflow.core.processes import World
from jacobiflow_lab.metrics.metric import MetricError

Progress = Callable[[str, int, int], object]  # (what, done by this process, of how many)


@dataclass(frozen=True, kw_only=True)
class DistributedMap:
    """Splits numbered items into batches and the batches among processes.

    The batches do not depend on the number of processes, so results do not either, up to rounding.
    """

    batch: int = 64
    world: World = field(default_factory=World)
    progress: Progress = lambda what, done, total: None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise MetricError(f"batch must be 1 or more, not {self.batch}")

    def batches(self, what: str, n: int) -> Iterator[Tensor]:
        """This process's batches of 0 .. n - 1, each a range of numbers."""
        starts = range(self.world.rank * self.batch, n, self.world.size * self.batch)
        total, done = sum(min(self.batch, n - start) for start in starts), 0
        self.progress(what, 0, total)
        for start in starts:
            index = torch.arange(start, min(start + self.batch, n))
            yield index
            done += len(index)
            self.progress(what, done, total)

    def gather(self, mine: list[tuple[int, Tensor]]) -> Tensor:
        """Values of all batches of all processes, in order; each brings (first number, values [n, ...])."""
        parts = self.world.gather(mine, None)
        pairs = sorted((pair for part in parts for pair in part), key=lambda pair: pair[0])
        return torch.cat([values for _, values in pairs] or [torch.empty(0)])

    def map(self, what: str, n: int, each: Callable[[Tensor], Tensor]) -> Tensor:
        """each(numbers) [len(numbers), ...] of all of 0 .. n - 1, on every process."""
        return self.gather([(int(index[0]), each(index)) for index in self.batches(what, n)])
