"""TransformInverter: the inverse of another library's transform by our decoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from jacobiflow.adapters.masked import ForeignNetwork, Structure, pack, structure
from jacobiflow.adapters.module_state import Snapshot, State
from jacobiflow.adapters.transform_spec import TransformSpec, library_mode
from jacobiflow.core.block import Block, Cache, Conditioner, NoCache, Start, take
from jacobiflow.core.decode import decode
from jacobiflow.core.implicit import attach
from jacobiflow.core.method import Method
from jacobiflow.core.networks import MaskedNetwork
from jacobiflow.core.stopping import ROUNDING
from jacobiflow.flows.masked_mlp import MaskedConditioner
from jacobiflow.flows.weights import Watch
from jacobiflow.kernels.backend import bind
from jacobiflow.kernels.threads import torch_single_threaded

# Measured on a CPU (`make bench ARGS="accelerate table"`):
MIN_PASSES = 6  # an inverse of fewer passes cannot be beaten
MIN_PASSES_ANY_BATCH = 24  # from here on it is beaten at every batch size
SEQUENTIAL_FROM_MULTIPLICATIONS = 250_000  # per position; sequential decoding with a cache beats sweeps
MAP_MULTIPLICATIONS = 50  # cost of an elementwise map, per parameter
COMPACT_FROM_NUMBERS = 16_384  # in smaller batches solved rows cost less than taking them out
COMPACT_AT = 1 / 2  # solved rows leave larger batches when this share or less still moves
MAX_SWEEPS, MAX_SWEEPS_PER_POSITION = 16, 1 / 8  # then rows continue one position at a time
GRADIENT_TOL = 0.01  # share of tol: an error of the sample is an error of its gradient
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
        zeros = next(iter(self.weights())).new_zeros(rows, self.length, 1)
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


class TransformInverter:
    """Inverts one transform of another library. Packs its weights again when they change.

    Uses `__slots__` because sbi mutates any object with a `__dict__`.
    """

    __slots__ = ("masks", "min_rows", "network", "order", "spec", "structure", "units", "watch")

    def __init__(self, spec: TransformSpec) -> None:
        self.spec = spec
        self.min_rows = min_rows(spec, one_call=spec.network.activation is not None)  # at best; `pack` knows
        self.masks: list[Tensor] = []
        self.structure: Structure | None = None
        self.units: tuple[Tensor, ...] = ()
        self.order: Tensor | None = None  # the feature at each position; None is the natural order
        self.network: MaskedNetwork | None = None
        self.watch = Watch()

    def pack(self, state: State, spec: TransformSpec) -> bool:
        """Read weights and layers, which may have been replaced. False: call the original, because its masks
        are not autoregressive."""
        self.spec, net = spec, spec.network
        masks = [link.mask for link in net.links]
        known = len(masks) == len(self.masks)
        if not known or any(not torch.equal(a, b) for a, b in zip(masks, self.masks, strict=True)):
            self.masks, self.structure = masks, structure(net)
        if self.structure is None:
            return False
        self.units = tuple(u.to(masks[0].device) for u in self.structure.units)
        natural = bool((self.structure.order == torch.arange(spec.length)).all())
        self.order = None if natural else self.units[0]
        self.network = pack(net, self.structure) if net.activation is not None and state.bare else None
        self.min_rows = min_rows(spec, one_call=in_one_call(self.bind(None)))
        return True

    def fits(self, z: Tensor, context: Tensor | None) -> bool:
        """Whether the transform accepts these rows. The original reports what is wrong with others."""
        weight = self.spec.network.links[0].linear.weight
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

    def solve(self, z: Tensor, context: Tensor | None, tol: float) -> tuple[Tensor, Tensor, int]:
        """x [n, T] with z [n, T] = f(x), log |dx/dz| [n], and how many finite rows have no finite x."""
        with torch_single_threaded(z):
            block, z = self.bind(context), z.unsqueeze(-1)
            wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (z, *block.tensors()))
            tol = tolerance(tol, z.dtype, wanted, self.spec.resolution)
            x, log_det, lost = self._decode(block, z, tol)
            if tol > EXACT_LOG_DET_ABOVE:
                with torch.no_grad():
                    log_det = -block.forward(x)[1]
            if wanted:
                lent = Snapshot(self.spec.module).lent
                x, log_det = attach(block, z, x, log_det, tol=tol, lent=lent)
            return x.squeeze(-1), log_det, lost

    def _decode(self, block: Block, z: Tensor, tol: float) -> tuple[Tensor, Tensor, int]:
        """x [n, T, 1] and log |dx/dz| [n]; rows without a finite inverse are NaN. Counts those that became so
        here, not those that another layer has made so."""
        n, length, _ = z.shape
        width, max_sweeps = None, None
        if self.network is not None:  # one position at a time is cheap
            many = n * multiplications_per_position(self.spec.network) > SEQUENTIAL_FROM_MULTIPLICATIONS
            width = 1 if many or in_one_call(block) else None
            max_sweeps = MAX_SWEEPS + int(MAX_SWEEPS_PER_POSITION * length)
        method = Method(width=width, tol=tol, max_sweeps=max_sweeps, init="zeros", unit="relative")
        out = decode(block, z, method, compact_at=COMPACT_AT if z.numel() > COMPACT_FROM_NUMBERS else 0)
        lost = (~out.x.isfinite()).flatten(1).any(1).nonzero()[:, 0]
        if not len(lost):
            return out.x, out.log_det, 0
        out.x[lost] = out.log_det[lost] = float("nan")
        return out.x, out.log_det, int(z[lost].isfinite().flatten(1).all(1).sum())


def tolerance(tol: float, dtype: torch.dtype, gradients: bool, resolution: float) -> float:
    """The tolerance to solve to: `tol` in float32, its square in float64, which has twice the digits."""
    tol = tol**2 if dtype is torch.float64 else tol
    floor = max(ROUNDING * torch.finfo(dtype).eps, 2 * resolution)
    return max(floor, tol * (GRADIENT_TOL if gradients else 1))


def min_rows(spec: TransformSpec, *, one_call: bool) -> float:
    """Rows from which we expect to beat the original; infinity if no number of rows is enough.

    one_call: whether a backend solves all positions in one call.
    """
    if spec.passes < MIN_PASSES:
        return math.inf
    if spec.passes >= MIN_PASSES_ANY_BATCH or one_call:
        return 1
    if spec.network.activation is None:
        return math.inf
    return SEQUENTIAL_FROM_MULTIPLICATIONS / multiplications_per_position(spec.network)


def in_one_call(block: Block) -> bool:
    """Whether the backend solves all positions in one call, which nothing beats."""
    return block.engine.name == "c"


def multiplications_per_position(net: ForeignNetwork) -> float:
    """Multiplications per position and row, elementwise map included."""
    weights = sum(link.linear.weight.numel() for link in net.links)
    return weights / (2 * net.length) + MAP_MULTIPLICATIONS * net.rows.shape[1]
