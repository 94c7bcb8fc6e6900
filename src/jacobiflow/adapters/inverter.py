"""TransformInverter: the inverse of another library's transform by our decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jacobiflow.adapters import race
from jacobiflow.adapters.masked import Structure, pack, structure
from jacobiflow.adapters.module_state import Snapshot, State
from jacobiflow.adapters.transform_spec import TransformSpec, library_mode
from jacobiflow.core.block import Block, Cache, Conditioner, NoCache, Start, take
from jacobiflow.core.decode import decode
from jacobiflow.core.implicit import attach
from jacobiflow.core.method import Method
from jacobiflow.core.networks import MaskedNetwork
from jacobiflow.core.stopping import ROUNDING
from jacobiflow.flows.masked_mlp import MaskedConditioner
from jacobiflow.flows.weights import WeightMemo
from jacobiflow.kernels.backend import bind
from jacobiflow.kernels.threads import torch_single_threaded

COMPACT_FROM_NUMBERS = 16_384  # in smaller batches solved rows cost less than taking them out
COMPACT_AT = 1 / 2  # solved rows leave larger batches when this share or less still moves
MAX_SWEEPS, MAX_SWEEPS_PER_POSITION = 16, 1 / 8  # then rows continue one position at a time
LAST_PASSES = 3  # in the library's own arithmetic, where float32 samples have gradients
GRADIENT_TOL = 0.01  # share of tol: an error of the sample is an error of its gradient
MOST_NUMBERS = 1 << 24  # hidden units and features that are kept at once
KERNELS, STEPS, SWEEPS, FULL = "C kernels", "cached steps", "cached sweeps", "full sweeps"
EXACT_LOG_DET_ABOVE = 1e-5  # of tol, from which the log-determinant is computed again at the answer


@dataclass(frozen=True)
class ForeignConditioner:
    """Another library's network as it is: each call is a full pass.

    forward: theta [n, T, P] of x [n, T] and context [n, C], both in the order of positions.
    weights: what it reads now.
    """

    length: int
    forward: Callable[[Tensor, Tensor | None], Tensor]
    weights: Callable[[], Iterable[Tensor]]
    context: Tensor | None = None

    def select(self, rows: Tensor) -> ForeignConditioner:
        return self if self.context is None else replace(self, context=self.context[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.weights(), *(() if self.context is None else (self.context,)))

    def new_cache(self, n: int) -> NoCache:
        return NoCache()

    def first(self, n: int) -> Tensor:
        rows = 1 if self.context is None else n  # without context it is the same for all rows
        zeros = next(iter(self.weights()), torch.zeros(())).new_zeros(rows, self.length, 1)
        return self.all_params(zeros)[:, :1].expand(n, -1, -1)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        return take(self.all_params(x), start, width)

    def all_params(self, x: Tensor) -> Tensor:
        return self.forward(x[..., 0], self.context)


@dataclass(frozen=True)
class IndexedConditioner(MaskedConditioner):
    """A masked network for maps that differ between features: theta ends with each position's feature."""

    features: Tensor = field(kw_only=True)  # [T]

    def first(self, n: int) -> Tensor:
        return with_features(super().first(n), self.features, 0)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        return with_features(super().params(x, start, width, cache), self.features, start)


def with_features(theta: Tensor, features: Tensor, start: Start) -> Tensor:
    """theta [n, w, P] of positions from `start` on, with each position's feature as one more parameter."""
    every = features.to(theta)[None, :, None].expand(len(theta), -1, -1)
    return torch.cat((theta, take(every, start, theta.shape[1])), -1)


class Solution(NamedTuple):
    """x [n, T] with z = f(x), log |dx/dz| [n], and what it took."""

    x: Tensor
    log_det: Tensor
    lost: int  # finite rows that have no finite x
    passes: float  # of the whole network, in which as many positions are evaluated


class TransformInverter:
    """Inverts one transform of another library. Packs its weights again when they change.

    Uses `__slots__` because sbi mutates any object with a `__dict__`.
    """

    __slots__ = ("masks", "memo", "network", "order", "signature", "spec", "structure", "units", "ways")

    def __init__(self, spec: TransformSpec) -> None:
        self.spec = spec
        self.masks: list[Tensor] | None = None
        self.structure: Structure | None = None
        self.units: tuple[Tensor, ...] = ()
        self.order: Tensor | None = None  # the feature at each position; None is the natural order
        self.network: MaskedNetwork | None = None
        self.ways: tuple[str, ...] = ()  # in which it can be solved
        self.memo = WeightMemo()
        weights = tuple(link.linear.weight.shape for link in spec.network.links)
        kinds = type(spec.module), type(spec.bijector), spec.params
        self.signature = race.number((spec.passes, weights, kinds))

    def pack(self, state: State, spec: TransformSpec) -> bool:
        """Read weights and layers, which may have been replaced. False: call the original, because its masks
        are not autoregressive."""
        self.spec, net = spec, spec.network
        masks = [link.mask for link in net.links]
        known = self.masks is not None and len(masks) == len(self.masks)
        if not known or any(not torch.equal(a, b) for a, b in zip(masks, self.masks or (), strict=True)):
            self.masks, self.structure = masks, structure(net)
        if self.structure is None:
            return False
        self.units = tuple(u.to(spec.like.device) for u in self.structure.units)
        natural = bool((self.structure.order == torch.arange(spec.length)).all())
        self.order = None if natural else self.units[0]
        self.network = pack(net, self.structure) if net.activation is not None and state.bare else None
        self.ways = (FULL,) if self.network is None else (STEPS, SWEEPS)
        if self.bind(None).engine.name == "c":
            self.ways = (KERNELS,)  # all positions in one call, which nothing beats
        return True

    def slower(self) -> str:
        """Why no C kernel runs."""
        if self.network is None:
            return "its activation or connections are not known: each sweep is a full pass"
        if self.spec.like.dtype is not torch.float32 or self.spec.like.device.type != "cpu":
            return f"no C kernel for {self.spec.like.dtype} on {self.spec.like.device.type}"
        if not hasattr(self.spec.bijector, "describe"):
            return "no C kernel for its elementwise map"
        return "no C kernel for its activation, or no C compiler"

    def fits(self, z: Tensor, context: Tensor | None) -> bool:
        """Whether the transform accepts these rows. The original reports what is wrong with others."""
        weight = self.spec.like
        given = (z,) if context is None else (z, context)
        width = 0
        if context is not None:
            width = context.shape[-1] if context.ndim == 2 and len(context) in (1, len(z)) else -1
        return (
            z.ndim == 2
            and z.shape[1] == self.spec.length
            and width in self.spec.contexts
            and all(t.dtype is weight.dtype and t.device == weight.device for t in given)
        )

    @torch.no_grad()
    def bind(self, context: Tensor | None) -> Block:
        """The block for these rows of context [n, C]; [1, C] is the context of all rows."""
        spec, shared, terms = self.spec, tuple[Tensor, ...](), dict[int, Tensor]()
        if context is not None:
            if len(context) > 1 and not context.requires_grad and bool((context == context[:1]).all()):
                context = context[:1]
            if self.network is not None:
                terms = spec.network.terms(context, self.units)
            if len(context) == 1:
                shared, context = (context,), None

        def weights() -> tuple[Tensor, ...]:
            return (*spec.module.parameters(), *shared)

        forward, network = self._theta(*shared), self.network
        conditioner: Conditioner
        if network is None:
            conditioner = ForeignConditioner(spec.length, forward, weights, context)
        elif spec.indexed:
            features = self.units[0]
            conditioner = IndexedConditioner(network, forward, weights, context, terms, features=features)
        else:
            conditioner = MaskedConditioner(network, forward, weights, context, terms)
        return bind(conditioner, spec.bijector, self.order)

    def _theta(self, shared: Tensor | None = None) -> Callable[[Tensor, Tensor | None], Tensor]:
        """The library's own parameters, in the order of positions; shared: the context of all rows [1, C]."""
        spec, order, features = self.spec, self.order, self.units[0]
        back = None if order is None else torch.argsort(order)

        def theta(x: Tensor, context: Tensor | None) -> Tensor:
            context = context if shared is None else shared.expand(len(x), -1)
            with library_mode():
                own = spec.theta(x if back is None else x[:, back], context)
            own = own if order is None else own[:, order]
            return with_features(own, features, 0) if spec.indexed else own

        return theta

    def solve(self, z: Tensor, context: Tensor | None, tol: float, way: str) -> Solution:
        """Solve z [n, T] with context [n, C] or [1, C] in one of `ways`, a bounded number of rows at once."""
        numbers = sum(link.linear.out_features for link in self.spec.network.links) + self.spec.length
        rows = max(MOST_NUMBERS // numbers, 1)
        own = context is not None and len(context) == len(z)
        found = [
            self._solve(
                z[i : i + rows], context[i : i + rows] if own and context is not None else context, tol, way
            )
            for i in range(0, max(len(z), 1), rows)
        ]
        if len(found) == 1:
            return found[0]
        return Solution(
            torch.cat([part.x for part in found]),
            torch.cat([part.log_det for part in found]),
            sum(part.lost for part in found),
            max(part.passes for part in found),
        )

    def _solve(self, z: Tensor, context: Tensor | None, tol: float, way: str) -> Solution:
        with torch_single_threaded(z):
            block, z = self.bind(context), z.unsqueeze(-1)
            wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (z, *block.tensors()))
            tol = tolerance(tol, z.dtype, wanted, self.spec.resolution)
            x, log_det, lost, passes = self._decode(block, z, tol, way)
            with torch.no_grad():
                if tol > EXACT_LOG_DET_ABOVE:
                    log_det = -block.forward(x)[1]
                elif wanted and not self.spec.resolution and z.dtype is torch.float32:
                    for _ in range(LAST_PASSES):
                        x, log_det = block.sweep(x, z)
            if wanted:
                lent = Snapshot(self.spec.module).lent
                x, log_det = attach(block, z, x, log_det, tol=tol, lent=lent)
            return Solution(x.squeeze(-1), log_det, lost, passes)

    def _decode(self, block: Block, z: Tensor, tol: float, way: str) -> Solution:
        """As `solve`, x [n, T, 1]; rows without a finite inverse are NaN. Counts those that became so here,
        not those that another layer has made so."""
        length = z.shape[1]
        method = Method(
            width=None if way in (SWEEPS, FULL) else 1,
            tol=tol,
            max_sweeps=MAX_SWEEPS + int(MAX_SWEEPS_PER_POSITION * length) if way == SWEEPS else None,
            init="zeros",
            unit="relative",
        )
        out = decode(block, z, method, compact_at=COMPACT_AT if z.numel() > COMPACT_FROM_NUMBERS else 0)
        stats = out.stats.blocks[0]
        passes = (
            float(stats.sweeps.max() if way == FULL else stats.evaluated.max() / length) if len(z) else 0.0
        )
        lost = (~out.x.isfinite()).flatten(1).any(1).nonzero()[:, 0]
        if not len(lost):
            return Solution(out.x, out.log_det, 0, passes)
        out.x[lost] = out.log_det[lost] = float("nan")
        return Solution(out.x, out.log_det, int(z[lost].isfinite().flatten(1).all(1).sum()), passes)


def tolerance(tol: float, dtype: torch.dtype, gradients: bool, resolution: float) -> float:
    """The tolerance to solve to: `tol` in float32, its square in float64, which has twice the digits."""
    tol = tol**2 if dtype is torch.float64 else tol
    floor = max(ROUNDING * torch.finfo(dtype).eps, 2 * resolution)
    return max(floor, tol * (GRADIENT_TOL if gradients else 1))
