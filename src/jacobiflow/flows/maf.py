"""MAF and NSF: vectors of features, each block a masked MLP.

Papamakarios et al., 2017, Masked Autoregressive Flow; Durkan et al., 2019, Neural Spline Flows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from reprlib import repr as short
from typing import ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from jacobiflow.core.arguments import as_int, number, set_fields, set_ints, switch, word
from jacobiflow.core.bijectors import Bijector, ExpAffine, ScaleAffine, Spline
from jacobiflow.core.block import Conditioner
from jacobiflow.core.method import Init, Plan, Unit
from jacobiflow.core.rows import Noise
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.masked_mlp import Activation, MaskedMLP
from jacobiflow.flows.weights import linear_shapes

Transform = Literal["affine", "spline"]
Scale = Literal["softplus", "sigmoid", "exp"]


@dataclass(frozen=True, kw_only=True)
class MAFConfig:
    """The shape of a MAF (transform "affine") or an NSF ("spline").

    scale: z = (softplus(u) + min_scale) x + b, the same with a sigmoid, or TarFlow's z = (x - b) exp(-a).
    """

    ORDERS: ClassVar[tuple[str, ...]] = ("reversed", "random", "same")

    features: int  # Numbers of one x; images are grey squares of that many pixels.
    context: int = 0  # Numbers of context that a row needs; images bring none.
    blocks: int = 8  # Blocks of the flow, each a masked MLP.
    hidden: tuple[int, ...] = (512, 512)  # Widths of the hidden layers.
    transform: Transform = "affine"  # affine is MAF, spline is NSF.
    residual: bool = False  # Residual blocks h + W2 act(W1 act(h)), which need equal widths.
    activation: Activation = "relu"  # Of the hidden layers.
    scale: Scale = "softplus"  # How affine maps make a positive scale.
    min_scale: float = 1e-3  # Floor of softplus and sigmoid; bounds how far the inverse stretches.
    # How each block takes the features: every second one turned around, all shuffled, as they are; or permutations.
    order: Literal["reversed", "random", "same"] | tuple[tuple[int, ...], ...] = "reversed"
    order_seed: int = 0  # Seed of random orders.
    bins: int = 8  # Bins of a spline.
    bound: float = 5.0  # A spline is the identity outside of [-bound, bound].
    # Noise of the training data; training records it. None: unknown.
    noise: Noise | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        widths = self.hidden if np.ndim(self.hidden) else ()
        object.__setattr__(self, "hidden", tuple(as_int("MAFConfig.hidden", width, 1) for width in widths))
        set_ints(self, "MAFConfig", features=1, context=0, blocks=1, bins=2)
        set_fields(self, "MAFConfig", partial(as_int, most=2**63 - 1), "order_seed")
        set_fields(self, "MAFConfig", number, "min_scale", "bound")
        set_fields(self, "MAFConfig", switch, "residual")
        if not self.hidden:
            raise ValueError("MAFConfig.hidden needs widths of 1 or more, one a layer")
        if self.residual and len(set(self.hidden)) > 1:
            raise ValueError(f"MAFConfig.hidden must be all the same with residual, not {self.hidden}")
        for name, kind in (("transform", Transform), ("activation", Activation), ("scale", Scale)):
            word(f"MAFConfig.{name}", getattr(self, name), get_args(kind))
        if not 0 <= self.min_scale < 1 or not self.bound > 0:
            raise ValueError("MAFConfig.min_scale must be in [0, 1) and bound positive")
        if isinstance(self.order, str):
            word("MAFConfig.order", self.order, self.ORDERS)
            return
        try:
            orders = tuple(tuple(as_int("a feature", i) for i in order) for order in self.order)
        except (TypeError, ValueError):
            orders = ()
        whole = all(len(o) == self.features and sorted(o) == list(range(self.features)) for o in orders)
        if len(orders) != self.blocks or not whole:
            wrong = "MAFConfig.order must be a word or orders, one permutation of all features for each block"
            raise ValueError(f"{wrong}, not {short(self.order)}")
        object.__setattr__(self, "order", orders)

    def orders(self) -> list[Tensor]:
        if not isinstance(self.order, str):
            return [torch.tensor(o) for o in self.order]
        draw, same = torch.Generator().manual_seed(self.order_seed), torch.arange(self.features)
        if self.order == "random":
            return [torch.randperm(self.features, generator=draw) for _ in range(self.blocks)]
        return [same.flip(0) if k % 2 and self.order == "reversed" else same for k in range(self.blocks)]

    def widths(self) -> list[int]:
        """Widths of all hidden layers; a residual block has two."""
        first, *others = self.hidden
        return [first, *(width for width in others for _ in range(2 if self.residual else 1))]

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        sizes = [self.features, *self.widths()]
        for k in range(self.blocks):
            for i, (a, b) in enumerate(pairwise(sizes)):
                yield from linear_shapes(f"blocks.{k}.linears.{i}", a, b)
            if self.context:
                yield f"blocks.{k}.context.weight", (sizes[1], self.context)
            yield from linear_shapes(f"blocks.{k}.head", sizes[-1], self.features * self.bijector().params)

    def bijector(self) -> Bijector:
        if self.transform == "spline":
            return Spline(bins=self.bins, bound=self.bound)
        return ExpAffine() if self.scale == "exp" else ScaleAffine(self.scale, self.min_scale)


class MAF(Flow):
    """A flow over vectors [N, features]; latents have the same shape.

    >>> flow = MAF(MAFConfig(features=5, blocks=2, hidden=(16,), transform="spline"))
    >>> flow.sample(3, seed=0).x.shape
    torch.Size([3, 5])
    """

    config: MAFConfig
    family: ClassVar[str] = "maf"
    config_type: ClassVar[type[MAFConfig]] = MAFConfig
    default_tol: ClassVar[float] = 1e-4
    default_unit: ClassVar[Unit] = "relative"

    def __init__(self, config: MAFConfig) -> None:
        super().__init__(config)
        self.data_shape = self.latent_shape = (config.features,)
        self.context_features = config.context
        self.bijector = config.bijector()
        orders = config.orders()
        self.blocks = nn.ModuleList(map(self.network, orders))
        if isinstance(self.bijector, ScaleAffine):  # begin at scale 1
            unit = 1 - config.min_scale
            start = math.log(math.expm1(unit)) if config.scale == "softplus" else 4.0
            for block in self.blocks:
                block.head.bias.data[:: self.bijector.params] = start  # type: ignore[union-attr, operator]
        for k, order in enumerate(orders):
            natural = bool((order == torch.arange(config.features)).all())
            self.register_buffer(f"order{k}", None if natural else order, persistent=False)

    def network(self, order: Tensor) -> nn.Module:
        """The network of a block of this order; its `bind` makes a conditioner."""
        return MaskedMLP(self.config)

    def selective(self, tol: float, init: Init | None) -> Plan:
        """Sweeps everywhere: a masked MLP gains in every block."""
        return Plan.uniform(len(self.blocks), tol=tol, init=init)

    def to_sequence(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1)

    def from_sequence(self, x: Tensor) -> Tensor:
        return x.squeeze(-1)

    def bind(self, k: int, n: int, condition: Tensor | None, guidance: Guidance) -> tuple[Conditioner, Bijector]:
        if guidance.weight:
            raise ValueError("guidance is for TarFlow; this flow takes none")
        return self.blocks[k].bind(condition), self.bijector  # type: ignore[operator]
