"""The words that every layer shares: what a block is, how it is solved, what came out."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from torch import Tensor

if TYPE_CHECKING:
    from jacobiflow.core.plan import Plan

Init = Literal["zeros", "noise", "previous"]
Unit = Literal["absolute", "relative"]
OnFailure = Literal["fallback", "raise", "return"]
INITS: tuple[Init, ...] = ("zeros", "noise", "previous")
UNITS: tuple[Unit, ...] = ("absolute", "relative")
ON_FAILURE: tuple[OnFailure, ...] = ("fallback", "raise", "return")


class Status(enum.Enum):
    """How a sample's decoding ended, from best to worst; the value says what to do about it."""

    EXACT = "every position was solved to rounding; nothing to do"
    CONVERGED = "the last update was within tol; lower tol for an answer closer to exact"
    FELL_BACK = "sweeps failed and a narrower width solved it; plan a narrower width if it is frequent"
    SWEEP_LIMIT = "max_sweeps was reached first; raise max_sweeps or tol, or use a narrower width"
    NONFINITE = "the answer overflows in this dtype; try float64, or check the weights and the noise"

    @property
    def rank(self) -> int:
        """0 is best."""
        return _RANKS[self]

    @property
    def failed(self) -> bool:
        """Whether the sample has no answer within its tolerance."""
        return self.rank >= Status.SWEEP_LIMIT.rank


_RANKS = {status: i for i, status in enumerate(Status)}
STATUSES: tuple[Status, ...] = tuple(Status)


class JacobiflowError(Exception):
    """Base of the errors that a user can cause; the message is one line that says what to do."""


class DecodingError(JacobiflowError, ArithmeticError):
    """Samples of a block could not be decoded, and the caller asked to hear of it."""

    def __init__(self, block: int, samples: Sequence[int], status: Status) -> None:
        self.block = block
        self.samples = tuple(samples)
        self.status = status
        shown = ", ".join(map(str, self.samples[:8])) + (", ..." if len(self.samples) > 8 else "")
        super().__init__(f"block {block}, samples {shown}: {status.value}")


@dataclass(frozen=True, kw_only=True)
class Method:
    """How one block is solved: windows of `width` positions, swept until the update is <= `tol`.

    width: positions a window; None is the whole sequence, 1 is sequential decoding.
    tol: largest change of a sample in its last sweep. It decides when a whole window may stop; it does
        not bound the error. 0 asks for the exact answer.
    max_sweeps: sweeps a window may take; None is the bound after which a window is exact.
    init: the first guess of a window: "zeros", a fixed draw of standard normal "noise", or
        "previous", the block's own input.
    unit: what changes are measured in: "absolute", or "relative" to max(|x|, |z dx/dz|), which is right
        for variables and latents of any scale. None is the default of the flow's family.
    """

    width: int | None = None
    tol: float = 0.0
    max_sweeps: int | None = None
    init: Init = "previous"
    unit: Unit | None = None

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("max_sweeps", 1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(f"Method.{name} must be a whole number or None, not {value!r}")
            if value is not None and value < least:
                raise ValueError(f"Method.{name} must be {least} or more, not {value}")
        if isinstance(self.tol, bool) or not isinstance(self.tol, int | float):
            raise ValueError(f"Method.tol must be a number, not {self.tol!r}")
        if not 0 <= self.tol < float("inf"):
            raise ValueError(f"Method.tol must be finite and not negative, not {self.tol}")
        if self.init not in INITS:
            raise ValueError(f"Method.init must be one of {', '.join(INITS)}, not {self.init!r}")
        if self.unit is not None and self.unit not in UNITS:
            raise ValueError(f"Method.unit must be one of {', '.join(UNITS)} or None, not {self.unit!r}")


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A moment of decoding, for those who watch: positions lo .. hi - 1 have just been evaluated."""

    block: int  # in sampling order, the one next to the noise is 0
    number: int  # of sweeps so far; 0: only the first position is known, the rest is the first guess
    lo: int  # in the block's own order
    hi: int
    moving: Tensor  # [N] bool, on the CPU: the samples that took part
    x: Tensor  # [N, T, D], a copy: the answer as it stands


Watcher = Callable[[Sweep], None]


def joined(backends: Iterable[str]) -> str:
    """The backends of several blocks, each named once.

    >>> joined(["torch", "c", "torch"])
    'c + torch'
    """
    return " + ".join(sorted(set(backends)))


@dataclass(frozen=True, kw_only=True)
class BlockStats:
    """What one block cost and how it ended; tensors are [N], on the CPU."""

    sweeps: Tensor  # parallel updates; T - 1 for sequential decoding, the first position is given
    evaluated: Tensor  # positions that went through the conditioner, all sweeps together
    update: (
        Tensor  # largest change in the last sweep of windows that stopped within tol, in the method's unit
    )
    status: tuple[Status, ...]
    seconds: float
    backend: str = ""  # what evaluated the block: "torch", "c" or "compile"

    @property
    def worst(self) -> Status:
        """The worst status of any sample."""
        return max(self.status, key=lambda s: s.rank, default=Status.EXACT)

    def samples(self, status: Status) -> list[int]:
        """Which samples ended so."""
        return [i for i, s in enumerate(self.status) if s is status]


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The blocks in sampling order, the one next to the noise first."""

    blocks: tuple[BlockStats, ...]
    seconds: float
    residual: Tensor | None = None  # [N], largest |encode(x) - z| of a sample, if it was asked for
    plan: Plan | None = None  # what names and defaults became

    @property
    def backend(self) -> str:
        """What evaluated the blocks; several names are joined: "c + torch"."""
        return joined(b.backend for b in self.blocks)

    @property
    def status(self) -> Status:
        """The worst status of any sample in any block."""
        return max((b.worst for b in self.blocks), key=lambda s: s.rank, default=Status.EXACT)


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """x, and log |dx/dz| in nats [N], so that log p(x) = log p(z) - log_det."""

    x: Tensor
    log_det: Tensor
    stats: Stats = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """z, and log |dz/dx| in nats [N], so that log p(x) = log p(z) + log_det."""

    z: Tensor
    log_det: Tensor
