"""LatticeFlow: a MAF or NSF of fields on a lattice, trained by reverse KL for the Ising model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from reprlib import repr as short
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from jacobiflow.core.arguments import number, set_fields, set_ints, switch
from jacobiflow.core.method import Init, Method, Plan
from jacobiflow.core.records import RecordError, build
from jacobiflow.flows.maf import MAF, MAFConfig
from jacobiflow.flows.weights import linear_shapes
from jacobiflow_lab.lattice.ising import Ising
from jacobiflow_lab.lattice.lattice_mlp import LatticeMLP, neighbourhood, spread


@dataclass(frozen=True, kw_only=True)
class LatticeConfig(MAFConfig):
    """A MAFConfig whose features may be the sites of a square torus, row by row.

    Without a temperature it samples no Ising model. The matrix A of `linear` is the flow's buffer of that name, not
    trained and saved with the weights: the square root of the Ising model's K, or the identity.
    """

    ORDERS: ClassVar[tuple[str, ...]] = (*MAFConfig.ORDERS, "classes")

    order: Literal["reversed", "random", "same", "classes"] | tuple[tuple[int, ...], ...] = "reversed"  # type: ignore[assignment]
    """How blocks take the sites: as in MAFConfig, or classes of sites far apart, every second block backwards."""
    reach: int = 0  # Above 0, each block is a `LatticeMLP` that sees the sites within so many rows and columns.
    linear: bool = False  # x' = y' A next to the data, where y is what the blocks see.
    temperature: float = 0.0  # Of the Ising model that the flow samples; 0: none.
    shift: float = 0.0  # Added to the diagonal of the Ising model's K; 0: 4.04 / temperature.

    def __post_init__(self) -> None:
        super().__post_init__()
        set_ints(self, "LatticeConfig", reach=0)
        set_fields(self, "LatticeConfig", number, "temperature", "shift")
        set_fields(self, "LatticeConfig", switch, "linear")
        square = self.side**2 == self.features
        if self.reach and (not square or 2 * self.reach >= self.side):
            raise ValueError(
                f"LatticeConfig.reach {self.reach} needs as many features as a square of side "
                f"{2 * self.reach + 1} or more has, not {self.features}"
            )
        if self.reach and (self.context or self.residual):
            raise ValueError("LatticeConfig.reach goes with neither context nor residual: leave them out")
        if self.order == "classes" and (not self.reach or self.side % (self.reach + 1)):
            raise ValueError("LatticeConfig.order classes needs a reach, and reach + 1 must divide the side")
        if self.temperature:
            self.ising()  # checks temperature and shift
            if not square or self.context:
                raise ValueError("LatticeConfig.temperature needs a square number of features and no context")

    @property
    def side(self) -> int:
        """Sites along each direction of the torus."""
        return math.isqrt(self.features)

    def ising(self) -> Ising:
        """The Ising model that the flow samples."""
        return Ising(side=self.side, temperature=self.temperature, shift=self.shift)

    def orders(self) -> list[Tensor]:
        if self.order != "classes":
            return super().orders()
        classes = spread(self.side, self.reach + 1)
        return [(classes.flip(0) if k % 2 else classes).flatten() for k in range(self.blocks)]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self.linear:
            yield "linear", (self.features, self.features)
        if not self.reach:
            yield from super().shapes()
            return
        sizes = [2 * ((2 * self.reach + 1) ** 2 - 1), *self.hidden]
        for k in range(self.blocks):
            for i, (a, b) in enumerate(pairwise(sizes)):
                yield from linear_shapes(f"blocks.{k}.linears.{i}", a, b)
            yield from linear_shapes(f"blocks.{k}.head", sizes[-1], self.bijector().params)


class LatticeFlow(MAF):
    """A flow over fields [N, side * side].

    >>> flow = LatticeFlow(LatticeConfig(features=9, blocks=1, hidden=(8,), reach=1, temperature=3.0))
    >>> flow.sample(2, seed=0).x.shape
    torch.Size([2, 9])
    """

    config: LatticeConfig
    family: ClassVar[str] = "lattice"
    config_type: ClassVar[type[LatticeConfig]] = LatticeConfig
    trains_on_noise: ClassVar[bool] = True
    linear: Tensor | None  # [features, features]: x' = y' linear

    def __init__(self, config: LatticeConfig) -> None:
        super().__init__(config)
        linear = torch.eye(config.features) if config.linear else None
        if linear is not None and config.temperature:
            linear.copy_(config.ising().root())
        self.register_buffer("linear", linear)

    def network(self, order: Tensor) -> nn.Module:
        config = self.config
        if not config.reach:
            return super().network(order)
        near = order.argsort()[neighbourhood(config.side, config.reach)[order]]
        return LatticeMLP(near, self.bijector.params, config.hidden, config.activation)

    def selective(self, tol: float, init: Init | None) -> Plan:
        """Windows of one class: one sweep solves it, the next finds no change. This is exact, and a larger
        tol would save nothing. Other orders are swept as in a MAF.
        """
        if self.config.order != "classes":
            return super().selective(tol, init)
        width = (self.config.side // (self.config.reach + 1)) ** 2
        return Plan((Method(width=width, init=init),) * len(self.blocks))

    def to_sequence(self, x: Tensor) -> Tensor:
        y = x if self.linear is None else torch.linalg.solve(self.linear, x, left=False)
        return super().to_sequence(y)

    def from_sequence(self, x: Tensor) -> Tensor:
        y = super().from_sequence(x)
        return y if self.linear is None else y @ self.linear

    def data_log_det(self) -> Tensor | float:
        return 0.0 if self.linear is None else torch.linalg.slogdet(self.linear).logabsdet

    def training_loss(self, x: Tensor, labels: Tensor | None, tol: float) -> tuple[Tensor, Tensor]:
        """Reverse KL of the samples of noise x to the Ising model."""
        return reverse_kl(self, self.config.ising(), x, tol), x.square().mean(0)

    def as_shown(self, x: Tensor) -> Tensor:
        """The mean of each spin, given its field."""
        return x.tanh()

    @classmethod
    def adopt(cls, doc: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A MAF of version 0.1 whose config has `reach` or `linear`, or that has a `target`."""
        config, target = doc["config"], doc.get("target")
        if target is not None:
            if not isinstance(target, dict) or target.get("kind") != "ising":
                raise RecordError(f"target must be a table of kind ising, not {short(target)}")
            ising = build(Ising, {k: v for k, v in target.items() if k != "kind"}, "target")
            if ising.sites != config.get("features"):
                raise RecordError(f"target needs {ising.sites} features, not {config.get('features')}")
            config = config | {"temperature": ising.temperature, "shift": ising.shift}
        return {"family": cls.family, "config": config}


def reverse_kl(flow: MAF, target: Ising, z: Tensor, tol: float) -> Tensor:
    """Mean of log q(x) - log p(x) over the samples x of noise z, in nats per dimension.

    Its gradient is that along the samples alone, by the implicit function theorem. The rest of the full
    gradient, the mean of d log q(x) / d weights at fixed x, is zero in expectation and only adds noise.
    """
    x = flow.decode(z, tol=tol, differentiable=True).x
    with torch.enable_grad():
        at = x.detach().requires_grad_()
        gap = flow.log_prob(at) - target.log_density(at)
        (slope,) = torch.autograd.grad(gap.sum(), at)
    along = (x * slope).sum() / len(z)
    return (gap.detach().mean() + along - along.detach()) / math.prod(flow.data_shape)
