"""Elementwise maps of other libraries in closed form, for C kernels and for windows of positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.core.bijectors import Formula, Spline


class _LogAffine:
    """z = exp(a) x + b, theta = (b, raw). A subclass computes a from raw."""

    params = 2

    def _log_slope(self, raw: Tensor) -> Tensor:
        raise NotImplementedError

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
        strength = -1 / math.log(self.min_slope)
        return Formula("clipped_spline", (self.bins, self.bound, self.min_bin, strength))

    def _edges(self, raw: Tensor) -> Tensor:
        return super()._edges(raw / (1 + (raw * (2 / math.log(self.min_slope))).abs()))

    def _slopes(self, raw: Tensor) -> Tensor:
        return (raw / (1 + (raw / math.log(self.min_slope)).abs())).exp()
