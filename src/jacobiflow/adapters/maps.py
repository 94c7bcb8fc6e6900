"""Elementwise maps of other libraries: in closed form, which C kernels know, or as they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.adapters.transform_spec import Twin, library_mode
from jacobiflow.core.bijectors import Formula, Spline


class _LogAffine:
    """z = exp(a) x + b, theta = (b, raw). A subclass computes a = _log_slope(raw)."""

    params = 2
    _log_slope: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, raw = theta.chunk(2, dim=-1)
        a = self._log_slope(raw)
        return torch.addcmul(b, x, a.exp()), a

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, raw = theta.chunk(2, dim=-1)
        a = self._log_slope(raw)
        return (z - b) * torch.exp(-a), -a


@dataclass(frozen=True)
class ClampedAffine(_LogAffine):
    """Pyro's affine map. The value of a is clamped, its gradient is not."""

    low: float
    high: float

    def describe(self) -> Formula:
        return Formula("clamped", (self.low, self.high))

    def _log_slope(self, raw: Tensor) -> Tensor:
        return raw + (raw.clamp(self.low, self.high) - raw).detach()


@dataclass(frozen=True)
class SoftclipAffine(_LogAffine):
    """zuko's affine map: a = softclip(raw), which bounds the slope."""

    slope: float = 1e-3

    def describe(self) -> Formula:
        return Formula("softclip", (-1 / math.log(self.slope),))

    def _log_slope(self, raw: Tensor) -> Tensor:
        return raw / (1 + (raw / math.log(self.slope)).abs())


@dataclass(frozen=True)
class StableAffine:
    """z = s x + (1 - s) b, s = sigmoid(u + bias), theta = (b, u): Pyro's stable affine map."""

    bias: float
    params = 2

    def describe(self) -> Formula:
        return Formula("stable", (self.bias,))

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, u = theta.chunk(2, dim=-1)
        return torch.lerp(b, x, torch.sigmoid(u + self.bias)), F.logsigmoid(u + self.bias)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        b, u = theta.chunk(2, dim=-1)
        stretch = 1 + torch.exp(-u - self.bias)
        return stretch * z + (1 - stretch) * b, stretch.log()


class SoftplusSpline(Spline):
    """A spline whose slopes are softplus(theta) without an offset, as in nflows and normflows."""

    _offset = 0.0
    describe = Spline.describe


class SoftclipSpline(Spline):
    """zuko's rational-quadratic spline: soft-clipped parameters, slopes exponentiated."""

    def describe(self) -> Formula:
        return Formula("clipped_spline", (self.bins, self.bound, self.min_bin, -1 / math.log(self.min_slope)))

    def _edges(self, raw: Tensor) -> Tensor:
        return super()._edges(raw / (1 + (raw * (2 / math.log(self.min_slope))).abs()))

    def _slopes(self, raw: Tensor) -> Tensor:
        return (raw / (1 + (raw / math.log(self.min_slope)).abs())).exp()


@dataclass(frozen=True)
class ForeignMap:
    """The elementwise map of another library. If it differs between features, the last number of theta is the feature,
    and `function` also takes `features=`, the w features of all rows."""

    function: Callable[..., tuple[Tensor, Tensor]]  # of x or z [n, w], theta [n, w, P], `inverse=`: value, log-slope
    features: int = 0  # T, if it differs between features
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
        for first in set(at[:, 0].tolist()):
            rows = at[:, 0] == first
            new[rows], log_slope[rows] = self.function(value[rows], theta[rows], inverse=inverse, features=at[rows][0])
        return new, log_slope


def own_map(twin: Twin) -> ForeignMap:
    """The map of a transform by its own methods, which add up rows: each number is given as a row of its own."""

    def function(value: Tensor, theta: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        forward, back = twin(lambda x: theta.reshape(-1, 1, theta.shape[-1]), 1)
        new, log_slope = (back if inverse else forward)(value.reshape(-1, 1))
        return new.view(value.shape), log_slope.view(value.shape)

    return ForeignMap(function)
