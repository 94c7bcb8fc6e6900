"""Autoregressive transforms of other libraries as Blocks, and their slow direction by sweeps.

A library says how a transform computes its parameters, which elementwise map it applies and, if the
conditioner is a masked network, how that is wired (`Foreign`). The rest is the same for all of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from jacobiflow.adapters.conditioner import Snapshot, State, ordinary
from jacobiflow.adapters.masked import Network, Structure, pack, structure, with_context
from jacobiflow.core import native
from jacobiflow.core.bijectors import Bijector, Spline
from jacobiflow.core.decode import decode
from jacobiflow.core.implicit import attach
from jacobiflow.core.stopping import ROUNDING
from jacobiflow.core.types import Cache, Decoded, Method, Status
from jacobiflow.flows.masked import Packed
from jacobiflow.flows.native_masked import kind
from jacobiflow.flows.units import Units
from jacobiflow.flows.weights import Watch

# Measured on a CPU (`make bench ARGS="accelerate table"`):
SMALL, MANY = 6, 24  # passes of the original that can be beaten if rows are many, and whatever they are
BUSY = 250_000  # multiplications from which one position at a time, each computed once, beats sweeps
MAP = 50  # what an elementwise map costs, in multiplications a parameter
FEW = 16_384  # numbers whose rows stay in the batch when they have stopped
COMPACT_AT = 1 / 2  # rows that have stopped leave the batch when so many are left
PATIENCE = 16  # sweeps, and an eighth of the features more, after which rows go one position at a time
GRADIENT_TOL = 0.01  # of tol: an error of the sample is an error of its gradient
LOOSE = 1e-5  # of tol, from which the log-determinant is that of the answer only if it is computed there


@dataclass(frozen=True)
class ForeignMap:
    """Another library's elementwise function of z or x [n, w] and theta [n, w, P]."""

    function: Callable[..., tuple[Tensor, Tensor]]  # with `inverse`; value and log-derivative
    indexed: bool = False  # whether it takes the feature as a last parameter
    params: int = 0

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        z, slope = self.function(x[..., 0], theta, inverse=False)
        return z.unsqueeze(-1), slope.unsqueeze(-1)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        x, slope = self.function(z[..., 0], theta, inverse=True)
        return x.unsqueeze(-1), slope.unsqueeze(-1)


def cut(function: Callable[..., Any], *ends: int, **options: Any) -> Callable[..., Any]:
    """`function` of a value and several parameters, which come in one tensor, cut at `ends`."""

    def whole(z: Tensor, theta: Tensor, inverse: bool) -> Any:
        return function(z, *theta.tensor_split(ends, -1), inverse=inverse, **options)

    return whole


class SoftplusSpline(Spline):
    """Slopes are softplus(theta), without an offset: the convention of nflows and those after it."""

    @property
    def _offset(self) -> float:
        return 0.0


@dataclass(frozen=True)
class Foreign:
    """An autoregressive transform z = f(x; theta(x)) of another library."""

    length: int
    passes: int  # of the whole conditioner that the original inverse takes
    module: nn.Module  # all that has weights
    contexts: tuple[int, ...]  # features of context that it takes; 0: none
    theta: Callable[[Tensor, Tensor | None], Tensor]  # x [n, T], context [n, C] -> [n, T, P]
    bijector: Bijector
    network: Network  # the wiring of the conditioner
    indexed: bool = False  # whether the bijector takes the feature as a last parameter
    resolution: float = 0.0  # of the elementwise inverse, if that is itself an approximation
    ours: bool = True  # whether the elementwise map is our own code


@dataclass
class _Blank:
    """The cache of a conditioner that has none."""

    valid: int = 0

    def select(self, rows: Tensor) -> _Blank:
        return _Blank(self.valid)


@dataclass(frozen=True)
class ForeignBlock:
    """A foreign transform with context bound: what decoders see. Positions are in its own order."""

    about: Foreign
    order: Tensor | None  # the feature at each position; None is the natural order
    packed: Packed | None
    units: tuple[Tensor, ...]
    context: Tensor | None  # [n, C], or [1, C] for all rows
    tied: bool  # whether all rows have the same context

    @property
    def length(self) -> int:
        return self.about.length

    @property
    def rows(self) -> int | None:
        return None

    def select(self, rows: Tensor) -> ForeignBlock:
        if self.context is None or self.tied:
            return self
        return replace(self, context=self.context[rows])

    def tensors(self) -> tuple[Tensor, ...]:
        return (*self.about.module.parameters(), *(() if self.context is None else (self.context,)))

    def new_cache(self, n: int) -> Cache:
        if self.packed is None:
            return _Blank()
        terms = {}
        if self.context is not None and not self.tied:
            terms = self.about.network.terms(self.context, self.units)
        return self.packed.new_cache(n, terms)

    def params(self, x: Tensor, lo: int, hi: int, cache: Cache | None = None) -> Tensor:
        theta = self._params(x, lo, hi, cache)
        if not self.about.indexed:
            return theta
        feature = torch.arange(lo, hi, device=x.device) if self.order is None else self.order[lo:hi]
        return torch.cat((theta, feature.to(theta)[None, :, None].expand(len(x), -1, 1)), -1)

    def _params(self, x: Tensor, lo: int, hi: int, cache: Cache | None) -> Tensor:
        if isinstance(cache, Units):
            return cache.params(x, lo, hi)
        if cache is not None:
            cache.valid = hi - 1
        if torch.is_grad_enabled():
            return self._theta(x)[:, lo:hi]
        # What a library keeps between calls must not be an inference tensor.
        with torch.inference_mode(False), torch.no_grad():
            return self._theta(x)[:, lo:hi]

    def _theta(self, x: Tensor) -> Tensor:
        flat, context = x[..., 0], self.context
        if self.order is not None:
            flat = flat[:, torch.argsort(self.order)]
        if context is not None:
            context = context.expand(len(x), -1)
        theta = self.about.theta(flat, context)
        return theta if self.order is None else theta[:, self.order]

    def single(self, x: Tensor, z: Tensor, lo: int, hi: int, cache: Cache | None) -> Tensor | None:
        """As `Units.single`."""
        by = getattr(self.about.bijector, "compiled", None)
        return cache.single(x, z, lo, hi, by) if by is not None and isinstance(cache, Units) else None

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.about.bijector.forward(x, theta)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        if self.about.ours or torch.is_grad_enabled():
            return self.about.bijector.inverse(z, theta)
        with torch.inference_mode(False), torch.no_grad():
            return self.about.bijector.inverse(z, theta)


class Solver:
    """Solves one foreign transform; keeps its packed weights as long as they do not change.

    It has slots and no attributes: sbi walks through all that has, and writes into it.
    """

    __slots__ = ("about", "least", "masks", "order", "packed", "structure", "units", "watch")

    def __init__(self, about: Foreign) -> None:
        self.about = about
        self.least = least(about)
        self.structure: Structure | None = None
        self.units: tuple[Tensor, ...] = ()
        self.order: Tensor | None = None
        self.packed: Packed | None = None
        self.masks: list[Tensor] = []
        self.watch = Watch()

    def pack(self, state: State, about: Foreign | None) -> bool:
        """Take the weights in; layers may have been replaced, too. False where sweeps would be wrong: the
        masks are not those of an autoregressive map."""
        if about is None:
            return False
        self.about, self.least = about, least(about)
        net = about.network
        masks = [link.mask for link in net.links]
        known = len(masks) == len(self.masks)
        if not known or any(not torch.equal(a, b) for a, b in zip(masks, self.masks, strict=True)):
            self.masks, self.structure = masks, structure(net)
        if self.structure is not None:
            self.units = tuple(u.to(masks[0].device) for u in self.structure.units)
            natural = bool((self.structure.order == torch.arange(self.about.length)).all())
            self.order = None if natural else self.units[0]
            self.packed = pack(net, self.structure) if net.activation is not None and state.bare else None
        return self.structure is not None

    def fits(self, z: Tensor, context: Tensor | None) -> bool:
        """Whether the transform takes such rows; what to say of others is the original's business."""
        weight = self.about.network.links[0].linear.weight
        given = (z,) if context is None else (z, context)
        width = 0
        if context is not None:
            width = context.shape[-1] if context.ndim == 2 and len(context) in (1, len(z)) else -1
        return (
            z.ndim == 2
            and z.shape[1] == self.about.length
            and width in self.about.contexts
            and all(t.dtype is weight.dtype and t.device == weight.device for t in given)
        )

    def bind(self, context: Tensor | None) -> ForeignBlock:
        """The block for these rows of context."""
        packed = self.packed
        tied = context is not None and (
            len(context) == 1 or (not context.requires_grad and bool((context == context[:1]).all()))
        )
        if context is not None and tied:
            context = context[:1]
            if packed is not None:
                with torch.no_grad():
                    packed = with_context(packed, self.about.network.terms(context, self.units))
        return ForeignBlock(self.about, self.order, packed, self.units, context, tied)

    def solve(self, z: Tensor, context: Tensor | None, tol: float) -> tuple[Tensor, Tensor, int]:
        """x [n, T] with z [n, T] = f(x), log |dx/dz| [n], and how many finite rows have no finite x."""
        with native.alone(z):
            return self._solve(z, context, tol)

    def _solve(self, z: Tensor, context: Tensor | None, tol: float) -> tuple[Tensor, Tensor, int]:
        block = self.bind(context)
        seq = (z if block.order is None else z.index_select(1, block.order)).unsqueeze(-1)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (z, *block.tensors()))
        tol = tolerance(tol, z.dtype, wanted, self.about.resolution)
        x, log_det, lost = self._decode(block, seq, tol)
        if tol > LOOSE:
            with torch.no_grad():
                log_det = -block.forward(x, block.params(x, 0, block.length))[1].flatten(1).sum(1)
        if wanted:
            lent = Snapshot(self.about.module).lent
            x, log_det = attach(block, seq, x, log_det, tol=tol, lent=lent)
        x = x.squeeze(-1)
        return x if block.order is None else x.index_select(1, torch.argsort(block.order)), log_det, lost

    def _decode(self, block: ForeignBlock, z: Tensor, tol: float) -> tuple[Tensor, Tensor, int]:
        """x [n, T, 1] and log |dx/dz| [n], rows without a finite inverse as the original gives them, and how
        many these are."""
        n = len(z)
        single = Method(width=1)
        method = Method(tol=tol, init="zeros", unit="relative")
        if block.packed:  # one position at a time is cheap: at once, or for rows not solved by sweeps soon
            at_once = compiled(self.about) or work(self.about.network, n) > BUSY
            method = single if at_once else replace(method, max_sweeps=PATIENCE + block.length // 8)
        out = decode(
            block,
            z,
            method,
            compact_at=COMPACT_AT if n * block.length > FEW else 0,  # few cost less to sweep than to take out
            on_failure="return" if block.packed else "fallback",
        )
        x, log_det = out.x, out.log_det
        lost = _lost(out)
        if len(lost) and block.packed and method.width != 1:
            rows = lost.to(z.device)
            again = decode(block.select(rows), z[rows], single)
            x[rows], log_det[rows] = again.x, again.log_det
            lost = lost[_lost(again)]
        return x, log_det, _as_original(z, x, log_det, lost.to(z.device)) if len(lost) else 0


def _lost(out: Decoded) -> Tensor:
    """The rows that are not solved."""
    status = out.stats.blocks[0].status
    if sum(status.count(s) for s in Status if not s.failed) == len(status):  # far sooner than one by one
        return torch.empty(0, dtype=torch.long)
    return torch.tensor([i for i, s in enumerate(status) if s.failed], dtype=torch.long)


def tolerance(tol: float, dtype: torch.dtype, gradients: bool, resolution: float) -> float:
    """What can be asked for: `tol` is meant for float32; float64, with twice the digits, takes its square."""
    tol = tol**2 if dtype is torch.float64 else tol
    floor = max(ROUNDING * torch.finfo(dtype).eps, 2 * resolution)
    return max(floor, tol * (GRADIENT_TOL if gradients else 1))


def _as_original(z: Tensor, x: Tensor, log_det: Tensor, rows: Tensor) -> int:
    """Rows without a finite inverse, as an original gives them that sweeps all features together: a
    non-finite number reaches all features in the next pass, unless it is the last one. Returns how many
    rows did not come in so from another layer."""
    early = rows[~x[rows, :-1].isfinite().flatten(1).all(1)]
    x[early] = log_det[early] = float("nan")
    return int(z[rows].isfinite().flatten(1).all(1).sum())


class Patch:
    """Stands in for a method of one object. It is pickled and copied with its owner, and holds no weights."""

    method: ClassVar[str]
    owners: ClassVar[tuple[type, ...]]

    def __init__(self, owner: Any, tol: float) -> None:
        self.owner, self.tol = owner, tol
        self.before = vars(owner).get(self.method)  # set on the object, not by its class
        self.solver: Solver | None = None

    def describe(self) -> Foreign | None:
        """What the owner is; None if it cannot be accelerated."""
        raise NotImplementedError

    def original(self) -> Callable[..., Any]:
        """The method as it was."""
        if self.before is not None:
            return self.before  # type: ignore[no-any-return]
        return getattr(type(self.owner), self.method).__get__(self.owner)  # type: ignore[no-any-return]

    def install(self) -> None:
        """From now on calls of the method come here."""
        setattr(self.owner, self.method, self)

    def remove(self) -> None:
        """The owner as it was."""
        delattr(self.owner, self.method)
        if self.before is not None:
            setattr(self.owner, self.method, self.before)

    def parts(self) -> Iterable[nn.Module]:
        """The modules that parameters are computed by."""
        raise NotImplementedError

    def shared(self) -> Solver:
        """The solver of this owner."""
        if self.solver is None:
            about = self.describe()
            assert about is not None
            self.solver = Solver(about)
        return self.solver

    def solved(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor] | None:
        """x [n, T] with z [n, T] = f(x), and log |dx/dz| [n]; None where the original must run, because
        sweeps are wrong or not worth while."""
        solver = self.shared()
        if not solver.least <= len(z) or not ordinary(z):
            return None
        state = State(self.parts())
        if not state.steady:
            return None

        def use(right: bool) -> tuple[Tensor, Tensor, int] | None:
            worth = right and solver.fits(z, context) and solver.least <= len(z)
            return solver.solve(z, context, self.tol) if worth else None

        groups = ((None, state.tensors),)
        found = solver.watch.solve(groups, lambda: solver.pack(state, self.describe()), use)
        if found is None:
            return None
        x, log_det, lost = found
        if lost:
            wider = "" if z.dtype is torch.float64 else "try float64, or "
            warnings.warn(
                f"{lost} of {len(z)} samples have no finite inverse in {z.dtype}: they are not finite, as "
                f"they would be without acceleration; {wider}check the weights and the noise",
                RuntimeWarning,
                stacklevel=3,
            )
        return x, log_det

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "solver": None}


def least(about: Foreign) -> float:
    """How many rows it takes for sweeps, or single positions from a cache, to be expected to beat the
    original; infinity if no number does."""
    if about.passes < SMALL:
        return math.inf
    if about.passes >= MANY or compiled(about):
        return 1
    return math.inf if about.network.activation is None else BUSY / work(about.network, 1)


def compiled(about: Foreign) -> bool:
    """Whether one position after the other is solved in compiled code: nothing beats that."""
    net = about.network
    if net.activation is None or kind(net.activation) is None or len(net.links) < 2:
        return False
    with torch.no_grad():
        known = getattr(about.bijector, "compiled", None) is not None
        return known and native.usable(net.links[0].linear.weight) is not None


def work(net: Network, n: int) -> float:
    """Multiplications a position of n rows, elementwise map included."""
    weights = sum(link.linear.weight.numel() for link in net.links)
    return n * (weights / (2 * net.length) + MAP * net.rows.shape[1])
