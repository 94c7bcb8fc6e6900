"""The inverse of another library's transform by our decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from itertools import repeat
from typing import NamedTuple

import torch
from torch import Tensor

from jacobiflow.adapters.maps import ForeignMap
from jacobiflow.adapters.masked import pack, structure
from jacobiflow.adapters.transform_spec import Declined, State, TransformSpec, library_mode
from jacobiflow.core.block import Block, Cache, Conditioner, MaskedNetwork, NoCache, Start, WrappedConditioner, take
from jacobiflow.core.decode import decode
from jacobiflow.core.implicit import attach
from jacobiflow.core.method import Method
from jacobiflow.core.results import Status
from jacobiflow.core.stopping import ROUNDING
from jacobiflow.flows.masked_mlp import MaskedConditioner
from jacobiflow.flows.weights import WeightMemo, tensors_of
from jacobiflow.kernels.backend import bind
from jacobiflow.kernels.c_masked import activation_code
from jacobiflow.kernels.threads import torch_single_threaded

COMPACT_FROM_NUMBERS = 16_384  # in smaller batches solved rows cost less than taking them out
COMPACT_AT = 1 / 2  # solved rows leave larger batches when this share or less still moves
MAX_SWEEPS, MAX_SWEEPS_PER_POSITION = 16, 1 / 8  # then rows continue one position at a time
LAST_PASSES = 3  # in the library's own arithmetic, where float32 samples have gradients
GRADIENT_TOL = 0.01  # share of tol: an error of the sample is an error of its gradient
MOST_NUMBERS = 1 << 24  # hidden units and features that are kept at once
KERNELS, STEPS, SWEEPS, FULL = "C kernels", "cached steps", "cached sweeps", "full sweeps"
EXACT_LOG_DET_ABOVE = 1e-5  # of tol, from which the log-determinant is computed again at the answer
method_of = cache(partial(Method, init="zeros", unit="relative"))


@dataclass(frozen=True)
class ForeignConditioner:
    """Another library's network as it is: each call is a full pass."""

    length: int
    forward: Callable[[Tensor, Tensor | None], Tensor]  # theta [n, T, P] of x [n, T] in the order of positions
    weights: tuple[Tensor, ...]  # what it reads
    like: Tensor  # has their dtype and device
    context: Tensor | None = None

    def select(self, rows: Tensor) -> ForeignConditioner:
        return self if self.context is None else replace(self, context=self.context[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return self.weights if self.context is None else (*self.weights, self.context)

    def new_cache(self, n: int) -> NoCache:
        return NoCache()

    def first(self, n: int) -> Tensor:
        rows = 1 if self.context is None else n  # without context it is the same for all rows
        return self.all_params(self.like.new_zeros(rows, self.length, 1))[:, :1].expand(n, -1, -1)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        return take(self.all_params(x), start, width)

    def all_params(self, x: Tensor) -> Tensor:
        return self.forward(x[..., 0], self.context)


@dataclass(frozen=True)
class IndexedConditioner(WrappedConditioner):
    """A network for maps that differ between features: theta ends with each position's feature."""

    features: Tensor  # [T]

    def first(self, n: int) -> Tensor:
        return self._indexed(self.inner.first(n), 0)

    def params(self, x: Tensor, start: Start, width: int, cache: Cache) -> Tensor:
        return self._indexed(self.inner.params(x, start, width, cache), start)

    def all_params(self, x: Tensor) -> Tensor:
        return self._indexed(self.inner.all_params(x), 0)

    def _indexed(self, theta: Tensor, start: Start) -> Tensor:
        every = self.features.to(theta)[None, :, None].expand(len(theta), -1, -1)
        return torch.cat((theta, take(every, start, theta.shape[1])), -1)


class Solution(NamedTuple):
    """x [n, T] with z = f(x), log |dx/dz| [n], and what it took."""

    x: Tensor
    log_det: Tensor
    lost: int  # finite rows that have no finite x
    passes: float  # of the whole network, in which as many positions are evaluated


@dataclass(frozen=True)
class Packed:
    """A transform with its current weights, ready to be inverted."""

    spec: TransformSpec
    units: tuple[Tensor, ...]  # of each node in packed order; units[0] is the feature at each position
    order: Tensor | None  # units[0]; None is the natural order
    network: MaskedNetwork | None  # None: each sweep is a full pass
    plain: dict[int | None, Block] = field(default_factory=dict)  # without context, by the code of its activation

    @cached_property
    def ways(self) -> tuple[str, ...]:
        if self.bind(None).engine.name == "c":
            return (KERNELS,)  # all positions in one call, which nothing beats
        return (FULL,) if self.network is None else (STEPS, SWEEPS)

    def slower(self) -> str:
        if self.network is None:
            return "its activation or connections are not known: each sweep is a full pass"
        like, act, bijector = self.spec.like, self.network.activation, type(self.spec.bijector).__name__
        name = getattr(act, "__name__", type(act).__name__)
        return f"no C kernel for {like.dtype} on {like.device.type} with {bijector} and {name}, or no C compiler"

    def fits(self, z: Tensor, context: Tensor | None) -> bool:
        """Whether the transform accepts these rows. The original reports what is wrong with others."""
        spec, width = self.spec, 0
        if context is not None:
            width = context.shape[-1] if context.ndim == 2 and len(context) in (1, len(z)) else -1
        shapes = z.ndim == 2 and len(z) > 0 and (z.shape[1], width) == (spec.network.length, spec.context)
        return shapes and len({(t.dtype, t.device) for t in (z, context, spec.like) if t is not None}) == 1

    @torch.no_grad()
    def bind(self, context: Tensor | None) -> Block:
        """The block for these rows of context [n, C]; [1, C] is the context of all rows."""
        code = None if self.network is None else activation_code(self.network.activation)  # its options may change
        if (plain := context is None) and code in self.plain:
            return self.plain[code]
        spec, weights = self.spec, tuple(tensors_of(self.spec.module))
        terms, theta = dict[int, Tensor](), partial(self._theta, None)
        if context is not None:
            if len(context) > 1 and not context.requires_grad and bool((context == context[:1]).all()):
                context = context[:1]
            if self.network is not None:
                terms = spec.network.terms(context, self.units)
            if len(context) == 1:
                weights, theta, context = (*weights, context), partial(self._theta, context), None
        conditioner: Conditioner
        if self.network is None:
            conditioner = ForeignConditioner(spec.network.length, theta, weights, spec.like, context)
        else:
            conditioner = MaskedConditioner(self.network, theta, lambda: weights, context, terms)
        if isinstance(spec.bijector, ForeignMap) and spec.bijector.features:
            conditioner = IndexedConditioner(conditioner, self.units[0])
        block = bind(conditioner, spec.bijector, self.order)
        return self.plain.setdefault(code, block) if plain else block

    def _theta(self, shared: Tensor | None, x: Tensor, context: Tensor | None) -> Tensor:
        """The library's own parameters, in the order of positions; shared: the context of all rows [1, C]."""
        context = context if shared is None else shared.expand(len(x), -1)
        with library_mode():
            own = self.spec.theta(x if self.order is None else x[:, torch.argsort(self.order)], context)
        return own if self.order is None else own[:, self.order]

    def solve(self, z: Tensor, context: Tensor | None, tol: float, way: str) -> Solution:
        """Solve z [n, T] with context [n, C] or [1, C] in one of `ways`, a bounded number of rows at once."""
        numbers = sum(link.linear.out_features for link in self.spec.network.links) + self.spec.network.length
        if len(z) <= (rows := max(MOST_NUMBERS // numbers, 1)):
            return self._solve(z, context, tol, way)
        contexts = repeat(context) if context is None or len(context) != len(z) else torch.split(context, rows)
        found = [self._solve(*part, tol, way) for part in zip(torch.split(z, rows), contexts, strict=False)]
        x, log_det, lost, passes = zip(*found, strict=True)
        return Solution(torch.cat(x), torch.cat(log_det), sum(lost), max(passes))

    def _solve(self, z: Tensor, context: Tensor | None, tol: float, way: str) -> Solution:
        with torch_single_threaded(z):
            block, z = self.bind(context), z.unsqueeze(-1)
            wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (z, *block.conditioner.tensors()))
            tol = tolerance(tol, z.dtype, wanted, self.spec.resolution)
            most = MAX_SWEEPS + int(MAX_SWEEPS_PER_POSITION * block.length) if way == SWEEPS else None
            method = method_of(width=None if way in (SWEEPS, FULL) else 1, tol=tol, max_sweeps=most)
            out = decode(block, z, method, compact_at=COMPACT_AT if z.numel() > COMPACT_FROM_NUMBERS else 0)
            x, log_det, stats = out.x, out.log_det, out.stats.blocks[0]
            new = 0
            if Status.NONFINITE in stats.status:
                lost = ~x.isfinite().flatten(1).all(1)
                x[lost] = log_det[lost] = float("nan")
                new = int((lost & z.isfinite().flatten(1).all(1)).sum())  # other layers may have lost rows before
            with torch.no_grad():
                if tol > EXACT_LOG_DET_ABOVE:
                    log_det = -block.forward(x)[1]
                elif wanted and not self.spec.resolution and z.dtype is torch.float32:
                    for _ in range(LAST_PASSES):
                        x, log_det = block.sweep(x, z)
            if wanted:
                x, log_det = attach(block, z, x, log_det, tol=tol)
            passes = int(stats.sweeps.max()) if way == FULL else int(stats.evaluated.max()) / block.length
            return Solution(x.squeeze(-1), log_det, new, passes)


class TransformInverter:
    """Packs the weights of one transform again when they change."""

    __slots__ = ("memo", "signature", "spec", "structures")  # sbi mutates any object with a `__dict__`

    def __init__(self, spec: TransformSpec) -> None:
        self.spec, self.memo, self.structures = spec, WeightMemo(), WeightMemo()
        weights = tuple(link.linear.weight.shape for link in spec.network.links)
        kinds = type(spec.module), type(spec.bijector), spec.network.rows.shape[1]
        self.signature = hash((spec.passes, weights, kinds))  # of what decides which way is the fastest

    def pack(self, state: State, spec: TransformSpec) -> Packed:
        self.spec, net = spec, spec.network
        known = self.structures.fresh([link.mask for link in net.links], partial(structure, net))
        if known is None:
            raise Declined("its masks are not autoregressive in any order")
        units = tuple(u.to(spec.like.device) for u in known.units)
        natural = bool((known.order == torch.arange(spec.network.length)).all())
        network = pack(net, known) if net.activation is not None and state.bare else None
        return Packed(spec, units, None if natural else units[0], network)


def tolerance(tol: float, dtype: torch.dtype, gradients: bool, resolution: float) -> float:
    """The tolerance to solve to: `tol` in float32, its square in float64, which has twice the digits."""
    tol = tol**2 if dtype is torch.float64 else tol
    return max(ROUNDING * torch.finfo(dtype).eps, 2 * resolution, tol * (GRADIENT_TOL if gradients else 1))
