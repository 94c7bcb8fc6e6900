"""Elementwise monotone maps z = f(x; theta), their inverses and log-derivatives.

theta is [..., P * D] for x [..., D]: P groups of D numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Formula(NamedTuple):
    """The description of a bijector: the name of its formula and the numbers in it, without theta."""

    kind: str
    numbers: tuple[float, ...] = ()


def description(thing: object) -> object | None:
    """What `thing.describe()` returns, if the class of `thing` itself defines that method; else None.

    Bijectors return a `Formula`, conditioners a `BoundNetwork` or a `TransformerNetwork`. The method is not inherited:
    a subclass may compute something else, so it runs in torch until it describes itself.
    """
    describe = vars(type(thing)).get("describe")
    return None if describe is None else describe(thing)


class Bijector(Protocol):
    """An elementwise map. A method `describe` tells backends its `Formula`."""

    @property
    def params(self) -> int: ...  # per element of x
    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]: ...  # z and log |dz/dx|
    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]: ...  # x and log |dx/dz|


@dataclass(frozen=True)
class ExpAffine:
    """z = (x - b) exp(-a), theta = (a, b): TarFlow's convention."""

    params: int = 2

    def describe(self) -> Formula:
        return Formula("exp")

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        a, b = theta.chunk(2, dim=-1)
        return (x - b) * torch.exp(-a), -a

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        a, b = theta.chunk(2, dim=-1)
        return torch.addcmul(b, z, torch.exp(a)), a


@dataclass(frozen=True)
class Shift:
    """z = x - b, theta = b: the volume-preserving convention."""

    params: int = 1

    def describe(self) -> Formula:
        return Formula("shift")

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return x - theta, torch.zeros_like(x)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return z + theta, torch.zeros_like(z)


@dataclass(frozen=True)
class ScaleAffine:
    """z = s x + b, theta = (u, b), with s = softplus(u) + eps or s = sigmoid(u + 2) + eps: as in MAF libraries."""

    scale: Literal["softplus", "sigmoid"] = "softplus"
    eps: float = 1e-3  # bounds how much the inverse can stretch
    params: int = 2

    def describe(self) -> Formula:
        return Formula(self.scale, (self.eps,))

    def _scale_and_shift(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        u, b = theta.chunk(2, dim=-1)
        return (F.softplus(u) if self.scale == "softplus" else torch.sigmoid(u + 2.0)) + self.eps, b

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        s, b = self._scale_and_shift(theta)
        return torch.addcmul(b, x, s), s.log()

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        s, b = self._scale_and_shift(theta)
        return (z - b) / s, -s.log()


@dataclass(frozen=True)
class Spline:
    """Monotone rational-quadratic spline on [-bound, bound], the identity outside (Durkan et al., 2019).

    theta = (bins widths, bins heights, bins - 1 inner slopes), unconstrained. Widths and heights are softmaxed with a
    floor of `min_bin`, slopes softplused with a floor of `min_slope`, and the outermost slopes are 1, so that value
    and slope are continuous. Inside bin k, with t in [0, 1], width w, height h, s = h / w and slopes d0, d1:
        z = z_k + h (s t^2 + d0 t (1 - t)) / (s + (d1 + d0 - 2 s) t (1 - t))
    """

    bins: int = 8
    bound: float = 5.0
    min_bin: float = 1e-3
    min_slope: float = 1e-3

    def __post_init__(self) -> None:
        if self.bins < 2 or self.bins * self.min_bin >= 1:
            raise ValueError(f"a spline takes 2 bins or more, and less than 1 / {self.min_bin}, not {self.bins}")

    @property
    def params(self) -> int:
        return 3 * self.bins - 1

    def describe(self) -> Formula:
        return Formula("spline", (self.bins, self.bound, self.min_bin, self.min_slope, self._offset))

    @property
    def _offset(self) -> float:  # of 0, so that a fresh network has slope 1 and gives the identity
        return math.log(math.expm1(1.0 - self.min_slope))

    def _bin(self, value: Tensor, theta: Tensor, *, of_z: bool) -> tuple[Tensor, ...]:
        """Of the bin that holds each value of x or z: x_k, width, z_k, height and both slopes."""
        bins, dim = self.bins, value.shape[-1]
        theta = theta.reshape(*theta.shape[:-1], self.params, dim).transpose(-1, -2)  # [..., D, P]
        x_edges, z_edges = self._edges(theta[..., :bins]), self._edges(theta[..., bins : 2 * bins])
        slopes = F.pad(self._slopes(theta[..., 2 * bins :]), (1, 1), value=1.0)
        left = value[..., None] >= (z_edges if of_z else x_edges)
        k = left.sum(-1, keepdim=True).sub_(1).clamp_(0, bins - 1)
        (x0, x1), (z0, z1), (d0, d1) = (
            (t.gather(-1, k).squeeze(-1), t.gather(-1, k + 1).squeeze(-1)) for t in (x_edges, z_edges, slopes)
        )
        return x0, x1 - x0, z0, z1 - z0, d0, d1

    def _slopes(self, raw: Tensor) -> Tensor:
        return self.min_slope + F.softplus(raw + self._offset)

    def _edges(self, raw: Tensor) -> Tensor:
        sizes = self.min_bin + (1 - self.min_bin * self.bins) * raw.softmax(-1)
        edges = F.pad(sizes.cumsum(-1), (1, 0)) * (2 * self.bound) - self.bound
        edges[..., -1] = self.bound  # the sum rounds; the last edge must not
        return edges

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        inside = x.abs() < self.bound
        x0, w, z0, h, d0, d1 = self._bin(torch.where(inside, x, 0), theta, of_z=False)
        t = (torch.where(inside, x, x0) - x0) / w
        s = h / w
        z = z0 + h * (s * t**2 + d0 * t * (1 - t)) / (s + (d1 + d0 - 2 * s) * t * (1 - t))
        return torch.where(inside, z, x), torch.where(inside, _log_slope(t, s, d0, d1), 0)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        inside = z.abs() < self.bound
        x0, w, z0, h, d0, d1 = self._bin(torch.where(inside, z, 0), theta, of_z=True)
        y = torch.where(inside, z, z0) - z0
        s = h / w
        # z(t) is a ratio of quadratics: solve a t^2 + b t + c = 0 by the stable formula.
        mixed = d1 + d0 - 2 * s
        a = h * (s - d0) + y * mixed
        b = h * d0 - y * mixed
        c = -s * y
        t = (2 * c / (-b - torch.sqrt((b**2 - 4 * a * c).clamp_min(0)))).clamp(0, 1)  # rounding may leave the bin
        return torch.where(inside, x0 + t * w, z), torch.where(inside, -_log_slope(t, s, d0, d1), 0)


def _log_slope(t: Tensor, s: Tensor, d0: Tensor, d1: Tensor) -> Tensor:
    u = t * (1 - t)
    return (s**2 * (d1 * t**2 + 2 * s * u + d0 * (1 - t) ** 2)).log() - 2 * (s + (d1 + d0 - 2 * s) * u).log()
