"""Autoregressive transforms of other libraries as Blocks, and their slow direction by sweeps.

A library says how a transform computes its parameters, which elementwise map it applies and, if the
conditioner is a masked network, how that is wired (`Foreign`). The rest is the same for all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jacobiflow.adapters.masked import Network, Structure, Watch, pack, structure, with_context
from jacobiflow.core.bijectors import Bijector, Spline
from jacobiflow.core.decode import ROUNDING, decode
from jacobiflow.core.implicit import attach
from jacobiflow.core.types import Cache, Method, Status
from jacobiflow.flows.masked import Packed
from jacobiflow.flows.units import Units

GRADIENT_TOL = 0.01  # of tol: an error of the sample is an error of its gradient


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

    def _slopes(self, raw: Tensor) -> Tensor:
        return self.min_slope + F.softplus(raw)


@dataclass(frozen=True)
class Foreign:
    """An autoregressive transform z = f(x; theta(x)) of another library."""

    length: int
    passes: int  # of the whole conditioner that the original inverse takes
    module: nn.Module  # all that has weights
    conditioner: nn.Module
    theta: Callable[[Tensor, Tensor | None], Tensor]  # x [n, T], context [n, C] -> [n, T, P]
    bijector: Bijector
    network: Network  # the wiring of the conditioner
    indexed: bool = False  # whether the bijector takes the feature as a last parameter
    resolution: float = 0.0  # of the elementwise inverse, if that is itself an approximation

    @property
    def at_rest(self) -> bool:
        """Whether the conditioner computes the same every time: no batch norm or dropout in training."""
        return not any(
            m.training
            and (
                isinstance(m, nn.modules.batchnorm._BatchNorm)
                or (isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0)
            )
            for m in self.conditioner.modules()
        )


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

    def forward(self, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        return self.about.bijector.forward(x, theta)

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            return self.about.bijector.inverse(z, theta)
        with torch.inference_mode(False), torch.no_grad():
            return self.about.bijector.inverse(z, theta)


class Solver:
    """Solves one foreign transform; keeps its packed weights as long as they do not change."""

    def __init__(self, about: Foreign) -> None:
        self.about = about
        self.structure: Structure | None = None
        self.units: tuple[Tensor, ...] = ()
        self.order: Tensor | None = None
        self.packed: Packed | None = None
        self.masks: Watch | None = None
        self.weights: Watch | None = None

    def bind(self, context: Tensor | None) -> ForeignBlock | None:
        """The block for these rows of context; None if the masks are not those of an autoregressive map."""
        self._refresh()
        if self.structure is None:
            return None
        packed, units, net = self.packed, self.units, self.about.network
        tied = context is not None and (
            len(context) == 1 or (not context.requires_grad and bool((context == context[:1]).all()))
        )
        if context is not None and tied:
            context = context[:1]
            if packed is not None:
                with torch.no_grad():
                    packed = with_context(packed, net.terms(context, units))
        return ForeignBlock(self.about, self.order, packed, units, context, tied)

    def _refresh(self) -> None:
        net, conditioner = self.about.network, self.about.conditioner
        masks = [link.linear.mask for link in net.links]
        if self.masks is None or not self.masks.same(masks):  # type: ignore[arg-type]
            self.masks, self.weights = Watch(masks), None  # type: ignore[arg-type]
            self.structure = structure(net)
        if self.structure is None:
            return
        tensors = [*conditioner.parameters(), *(b for b in conditioner.buffers() if b.is_floating_point())]
        if self.weights is None or not self.weights.same(tensors):
            self.weights = Watch(tensors)
            self.units = tuple(u.to(tensors[0].device) for u in self.structure.units)
            natural = bool((self.structure.order == torch.arange(self.about.length)).all())
            self.order = None if natural else self.units[0]
            self.packed = None if net.activation is None else pack(net, self.structure)

    def solve(self, z: Tensor, context: Tensor | None, tol: float) -> tuple[Tensor, Tensor]:
        """x [n, T] with z [n, T] = f(x), and log |dx/dz| [n]."""
        block = self.bind(context)
        assert block is not None
        seq = (z if block.order is None else z[:, block.order]).unsqueeze(-1)
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (z, *block.tensors()))
        tol = tolerance(tol, z.dtype, wanted, self.about.resolution)
        out = decode(block, seq, Method(tol=tol), relative=True)
        x, log_det = out.x, out.log_det
        lost = [i for i, s in enumerate(out.stats.blocks[0].status) if s is Status.NONFINITE]
        if lost:
            x, log_det = _as_original(block, z, x, log_det, lost)
        if wanted:
            x, log_det = attach(block, seq, x, log_det, tol=tol)
        x = x.squeeze(-1)
        return x if block.order is None else x[:, torch.argsort(block.order)], log_det


def tolerance(tol: float, dtype: torch.dtype, gradients: bool, resolution: float) -> float:
    """What can be asked for: `tol` is meant for float32; float64, with twice the digits, takes its square."""
    tol = tol**2 if dtype is torch.float64 else tol
    floor = max(ROUNDING * torch.finfo(dtype).eps, 2 * resolution)
    return max(floor, tol * (GRADIENT_TOL if gradients else 1))


def _as_original(
    block: ForeignBlock, z: Tensor, x: Tensor, log_det: Tensor, lost: list[int]
) -> tuple[Tensor, Tensor]:
    """Rows without a finite inverse, as an original gives them that sweeps all features together: a
    non-finite number reaches all features in the next pass, unless it is the last one."""
    rows = torch.tensor(lost, device=x.device)
    new = int(z[rows].isfinite().all(1).sum())
    if new:
        warnings.warn(
            f"{new} of {len(z)} samples have no finite inverse in {z.dtype}: they are not finite, as they "
            "would be without acceleration; try float64, or check the weights and the noise",
            RuntimeWarning,
            stacklevel=4,
        )
    early = ~x[rows, :-1].isfinite().flatten(1).all(1)
    x[rows[early]] = log_det[rows[early]] = float("nan")
    return x, log_det


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

    def shared(self) -> Solver:
        """The solver of this owner."""
        if self.solver is None:
            about = self.describe()
            assert about is not None
            self.solver = Solver(about)
        return self.solver

    def ready(self, z: Tensor) -> Solver | None:
        """The solver if sweeps are right and worth while for z [n, T]; else the original must run."""
        about = self.shared().about
        if z.ndim != 2 or z.shape[1] != about.length or not pays(about, len(z)) or not about.at_rest:
            return None
        return self.solver

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "solver": None}


def pays(about: Foreign, n: int) -> bool:
    """Whether sweeps can be expected to beat the original."""
    return n > 0 and about.passes > 8
