"""What an adapter says about a transform of another library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from jacobiflow.core.bijectors import Bijector

if TYPE_CHECKING:
    from jacobiflow.adapters.masked import ForeignNetwork

Map = Callable[[Tensor], tuple[Tensor, Tensor]]  # [n, w] -> [n, w] and the log-determinant [n]
Theta = Callable[[Tensor], Tensor]  # x [n, w] -> theta [n, w, P]
Twin = Callable[[Theta, int], tuple[Map, Map]]  # forward and inverse of the first w features, given theta


class Declined(Exception):
    """A transform looks familiar but cannot be accelerated, or not now. The text is the reason."""


class NothingToGain(Declined):
    """The inverse of a transform is fast as it is."""


@contextmanager
def library_mode() -> Iterator[None]:
    """Run code of another library outside inference mode: it may keep tensors for later calls."""
    gradients = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(gradients):
        yield


@dataclass(frozen=True)
class ForeignMap:
    """The elementwise map of another library.

    function: maps x or z [n, w] with theta [n, w, P] and `inverse=` to the value and its log-derivative.
    features: 0, or the number of features T if the map differs between features. The last number of theta
        is then the feature, and `function` also takes `features=`, the w features of all rows.
    """

    function: Callable[..., tuple[Tensor, Tensor]]
    features: int = 0
    params: int = 0  # as many as the network returns

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self._call(x, theta, inverse=False)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self._call(z, theta, inverse=True)

    def _call(self, value: Tensor, theta: Tensor, *, inverse: bool) -> tuple[Tensor, Tensor]:
        with library_mode():
            call = self._by_feature if self.features else self.function
            new, log_slope = call(value[..., 0], theta, inverse=inverse)
        return new.unsqueeze(-1), log_slope.unsqueeze(-1)

    def _by_feature(self, value: Tensor, theta: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        """Rows whose windows are at the same place are evaluated at once."""
        theta, at = theta[..., :-1], theta[..., -1].long()
        new, log_slope = torch.empty_like(value), torch.empty_like(value)
        for first in at[:, 0].unique():
            rows = at[:, 0] == first
            found = self.function(value[rows], theta[rows], inverse=inverse, features=at[rows][0])
            new[rows], log_slope[rows] = found
        return new, log_slope


def own_map(twin: Twin) -> ForeignMap:
    """The elementwise map of a transform by its own methods. They add up the log-derivatives of a row, so
    each number is given as a row of its own."""

    def function(value: Tensor, theta: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        forward, back = twin(lambda x: theta.reshape(-1, 1, theta.shape[-1]), 1)
        new, log_slope = (back if inverse else forward)(value.reshape(-1, 1))
        return new.view(value.shape), log_slope.view(value.shape)

    return ForeignMap(function)


@dataclass(frozen=True)
class TransformSpec:
    """An autoregressive transform z = f(x; theta(x)) of another library.

    `maps` and `networks` are candidates, the fastest first; `recognise.verify` keeps one of each.
    """

    module: nn.Module  # holds all weights
    passes: int  # calls of the whole network that the library's own inverse takes
    contexts: tuple[int, ...]  # context features that it may accept; 0: no context
    theta: Callable[[Tensor, Tensor | None], Tensor]  # x [n, T], context [n, C] -> [n, T, P]
    maps: tuple[Bijector, ...]
    networks: tuple[ForeignNetwork, ...]
    twin: Twin
    options: object = None  # what else the map depends on; comparable
    resolution: float = 0.0  # absolute error of the elementwise inverse, if that is an approximation

    @property
    def bijector(self) -> Bijector:
        return self.maps[0]

    @property
    def network(self) -> ForeignNetwork:
        return self.networks[0]

    @property
    def length(self) -> int:
        return self.network.length

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and the device of the weights."""
        return next(self.module.parameters(), torch.zeros(()))
