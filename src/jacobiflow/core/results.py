"""What decoding returns: samples, what they cost, how they ended; and the errors and warnings of every layer."""

from __future__ import annotations

import enum
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jacobiflow.core.method import Plan

OnFailure = Literal["fallback", "raise", "return"]
LARGE = 0.25  # a residual, in standard deviations of the noise; images then look different from exact ones
PACKAGE = str(Path(__file__).parents[1]) + os.sep

_warned: set[str] = set()


class Status(enum.Enum):
    """How a sample's decoding ended, from best to worst; the value says what to do about it."""

    EXACT = "every position was solved to rounding; nothing to do"
    CONVERGED = "the last update was within tol, which does not bound the error; check=True measures the residual"
    FELL_BACK = "sweeps failed and a narrower width solved it; plan a narrower width if it is frequent"
    SWEEP_LIMIT = "max_sweeps was reached first; raise max_sweeps or tol, or use a narrower width"
    NONFINITE = "the answer overflows in this dtype; try float64, or check the weights and the noise"

    @property
    def rank(self) -> int:
        """0 is best."""
        return STATUSES.index(self)

    @property
    def words(self) -> str:
        """The name as it is printed: "fell back"."""
        return self.name.lower().replace("_", " ")

    @property
    def failed(self) -> bool:
        """Whether the sample has no answer within its tolerance."""
        return self.rank >= Status.SWEEP_LIMIT.rank


STATUSES: tuple[Status, ...] = tuple(Status)


def _counted(ends: Sequence[Status]) -> str:
    """How many samples ended how: "3 exact, 13 converged"."""
    return ", ".join(f"{ends.count(s)} {s.words}" for s in Status if s in ends) or "none"


class JacobiflowError(Exception):
    """Base of the errors that a user can cause; the message is one line that says what to do."""


def one_line(error: BaseException) -> str:
    """The message of any error in one line, or the name of its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def warn_once(text: str, about: str = "") -> None:
    """Warn, unless this process has already given the same warning, or one about the same thing."""
    if (about or text) not in _warned:
        _warned.add(about or text)
        warnings.warn(text, stacklevel=3)


def warn_caller(text: str) -> None:
    """Give a RuntimeWarning at the innermost line outside this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, RuntimeWarning, stacklevel=level)


class DecodingError(JacobiflowError, ArithmeticError):
    """Samples of a block could not be decoded, and the caller asked to hear of it."""

    def __init__(self, block: int, samples: Sequence[int], status: Status) -> None:
        self.block, self.samples, self.status = block, tuple(samples), status
        shown = [*map(str, self.samples[:8]), *["..."] * (len(self.samples) > 8)]
        super().__init__(f"block {block}, samples {', '.join(shown)}: {status.value}")


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


@dataclass(frozen=True, kw_only=True, repr=False)
class BlockStats:
    """What one block cost and how it ended; tensors are [N], on the CPU."""

    sweeps: Tensor  # parallel updates; T - 1 for sequential decoding, the first position is given
    evaluated: Tensor  # positions that went through the conditioner, all sweeps together
    update: Tensor  # largest change in the last sweep of windows that stopped within tol, in the method's unit
    status: tuple[Status, ...]
    seconds: float
    backend: str = ""  # what evaluated the block: "torch", "c" or "compile"
    guess_sweeps: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.long))
    precision: str = "float32"  # "mixed" if sweeps in bfloat16, `guess_sweeps` of them, improved the first guess

    @property
    def worst(self) -> Status:
        return max(self.status, key=lambda s: s.rank, default=Status.EXACT)

    def samples(self, status: Status) -> list[int]:
        return [i for i, s in enumerate(self.status) if s is status]

    def __repr__(self) -> str:
        sweeps = f"{float(self.sweeps.double().mean()):.1f} sweeps on average"
        return f"BlockStats of {len(self.status)} samples: {sweeps}, {_counted(self.status)}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Stats:
    """The blocks in sampling order, the one next to the noise first."""

    blocks: tuple[BlockStats, ...]
    seconds: float
    residual: Tensor | None = None  # [N], largest |encode(x) - z| of a sample, if it was asked for
    plan: Plan | None = None  # what names and defaults became

    @property
    def backend(self) -> str:
        """What evaluated the blocks, such as "c + torch"."""
        return " + ".join(sorted({b.backend for b in self.blocks}))

    @property
    def status(self) -> Status:
        """The worst status of any sample in any block."""
        return max((b.worst for b in self.blocks), key=lambda s: s.rank, default=Status.EXACT)

    @property
    def ends(self) -> list[Status]:
        """The worst status of each sample in any block."""
        return [max(each, key=lambda s: s.rank) for each in zip(*(b.status for b in self.blocks), strict=True)]

    def __repr__(self) -> str:
        ended = f"{len(self.ends)} sample{'s' * (len(self.ends) != 1)}: {_counted(self.ends)}"
        text = f"Stats of {ended}, {self.seconds:.3g} s, backend {self.backend}"
        if self.residual is None:
            return text + ", residual not measured" * (Status.CONVERGED in self.ends)
        if not len(self.residual):
            return text
        return f"{text}, residual at most {float(self.residual.max()):.2g}" + ", far from exact" * self.loose

    @property
    def loose(self) -> bool:
        """Whether the residual was measured and is large: images are visibly wrong, whatever their status."""
        return self.residual is not None and bool((self.residual > LARGE).any())

    def summary(self) -> str:
        """What ran in each block, what it cost and how it ended; what to do about the worst sample."""
        methods = [method.in_words() for method in self.plan] if self.plan else [""] * len(self.blocks)
        wide = max(map(len, (*methods, "method")))
        rows = [f"  block  sweeps  seconds  {'method':<{wide}}  ended"]
        for i, (words, b) in enumerate(zip(methods, self.blocks, strict=True)):
            cost = f"{float(b.sweeps.double().mean()):6.1f}  {b.seconds:7.3f}"
            rows.append(f"  {i:5}  {cost}  {words:<{wide}}  {_counted(b.status)}")
        last = "far from exact: lower tol, or use plan auto" if self.loose and not self.status.failed else ""
        return "\n".join([repr(self), *rows, f"  {last or f'{self.status.words}: {self.status.value}'}"])


@dataclass(frozen=True, kw_only=True, repr=False)
class Decoded:
    """x, and log |dx/dz| in nats [N], so that log p(x) = log p(z) - log_det. Notebooks show images as a grid."""

    x: Tensor
    log_det: Tensor
    stats: Stats

    def __repr__(self) -> str:
        return f"Decoded x {_shapes(self.x, self.log_det)}\n{self.stats}"

    def save(self, path: str | Path, *, columns: int | None = None) -> None:
        """Write the samples as one PNG; see `jacobiflow.save_images`."""
        from jacobiflow.core.pictures import save_images

        save_images(self.x, path, columns=columns)

    def _repr_png_(self) -> bytes | None:
        from jacobiflow.core.pictures import SHOWN, as_images, sheet_bytes

        if as_images(self.x[:1]) is None or not len(self.x):
            return None
        return sheet_bytes(self.x[:SHOWN])


@dataclass(frozen=True, kw_only=True, repr=False)
class Encoded:
    """z, and log |dz/dx| in nats [N], so that log p(x) = log p(z) + log_det."""

    z: Tensor
    log_det: Tensor

    def __repr__(self) -> str:
        return f"Encoded z {_shapes(self.z, self.log_det)}"


def _shapes(x: Tensor, log_det: Tensor) -> str:
    return f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}, log_det {list(log_det.shape)}"


def nonfinite_rows(x: Tensor) -> Tensor:
    """Which samples of x [N, ...] hold a number that is not finite: [N] bool, on the CPU."""
    return ~x.detach().isfinite().flatten(1).all(1).cpu()


def joined(parts: Sequence[Decoded]) -> Decoded:
    """Samples that were decoded one batch after the other, as one result. The plan is that of the first."""
    if len(parts) == 1:
        return parts[0]
    stats, blocks = [part.stats for part in parts], list[BlockStats]()
    residuals = [one.residual for one in stats if one.residual is not None]
    for same in zip(*(one.blocks for one in stats), strict=True):  # one block in all batches
        names = ("sweeps", "evaluated", "update", "guess_sweeps")
        tensors: dict[str, Any] = {name: torch.cat([getattr(one, name) for one in same]) for name in names}
        status = tuple(status for one in same for status in one.status)
        blocks.append(replace(same[0], status=status, seconds=sum(one.seconds for one in same), **tensors))
    residual, seconds = torch.cat(residuals) if residuals else None, sum(one.seconds for one in stats)
    return Decoded(
        x=torch.cat([part.x for part in parts]),
        log_det=torch.cat([part.log_det for part in parts]),
        stats=replace(stats[0], blocks=tuple(blocks), seconds=seconds, residual=residual),
    )
