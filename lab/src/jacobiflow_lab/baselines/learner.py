"""The interface between a baseline and the training loop."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from jacobiflow.core.results import JacobiflowError
from jacobiflow.core.rows import row_noise
from jacobiflow.training.loop import decay_of_average


class BaselineError(JacobiflowError, ValueError):
    """A baseline that cannot be trained, read or used."""


class TrainedBaseline(Protocol):
    """A trained baseline."""

    def sample(self, n: int, *, seed: int, start: int = 0) -> Tensor:
        """Pictures start, start + 1, ..., [n, C, H, W] in [-1, 1]; picture i depends on (seed, i) only."""


class Learner(ABC):
    """A baseline in training. Its whole state is in `model`, `optimizer` and `average`.

    A step draws only from the given generator, and the learning rate depends only on the step. So the result
    does not depend on the length of training, which a budget of seconds does not determine.
    """

    config_type: ClassVar[type[Any]]
    config: Any
    model: nn.Module
    live: nn.Module  # the part of `model` that samples
    average: nn.Module  # its running mean
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def learn(self, x: Tensor, draw: torch.Generator) -> dict[str, float]:
        """One step on images [B, C, H, W] in [-1, 1]. Returns the losses."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the safetensors and the config that `load` reads."""

    def begin(self, model: nn.Module, live: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Set the networks and the optimizer, and start to count the seconds of training."""
        self.model, self.live, self.optimizer = model, live, optimizer
        self.average = copy.deepcopy(live).eval().requires_grad_(False)
        model.register_buffer("seconds", torch.zeros((), dtype=torch.float64))

    def step(self, number: int, x: Tensor, draw: torch.Generator) -> dict[str, float]:
        """Step `number` of training, then the average of the weights."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * min(1.0, (number + 1) / max(self.config.warmup, 1))
        losses = self.learn(x, draw)
        if not all(math.isfinite(value) for value in losses.values()):
            raise BaselineError(f"the losses are {losses} at step {number}: use a lower lr and a new folder")
        keep = decay_of_average(number, self.config.ema)
        with torch.no_grad():
            theirs = self.live.state_dict()
            for name, mine in self.average.state_dict().items():
                if mine.is_floating_point():
                    mine.lerp_(theirs[name], 1 - keep)
                else:
                    mine.copy_(theirs[name])
        return losses


def noise(n: int, shape: tuple[int, ...], seed: int, start: int, like: Tensor) -> Tensor:
    """Standard normal noise with the dtype and device of `like`; row i depends on (seed, i) only."""
    return torch.from_numpy(row_noise(n, shape, seed, start)).to(like)
