"""Which of how many processes this is, and what they agree on."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class World:
    """Process `rank` of `size`, number `local` on this machine."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @classmethod
    def from_environment(cls) -> World:
        """As torchrun says; joins the process group if there is more than one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size, int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def leader(self) -> bool:
        """Whether this process writes files."""
        return self.rank == 0

    def mean(self, x: Tensor) -> Tensor:
        """The mean of all processes' x, the same numbers on each."""
        if self.size > 1:
            dist.all_reduce(x)
            x /= self.size
        return x

    def any(self, flag: bool) -> bool:
        """Whether any process says so; all wait for each other here."""
        vote = torch.tensor(float(flag))  # on the CPU: gloo waits longer than NCCL for a leader that writes
        return bool(self.mean(vote) > 0)
