"""The convergence profile of some weights: sweeps and deviation per block, width and tolerance.

Each cell solves one block approximately, the others exactly, and measures the deviation at the samples x.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jacobiflow.core.block import Block
from jacobiflow.core.decode import decode
from jacobiflow.core.files import read_text, write_text
from jacobiflow.core.method import Init, Method, Precision, Unit
from jacobiflow.core.records import RecordError, build, parse_json
from jacobiflow.flows.guidance import Guidance

if TYPE_CHECKING:
    from jacobiflow.flows.flow import Flow

FILE = "profile.json"
FORMAT = {"format": "jacobiflow-profile", "version": 1}
NOISES, FEWEST_NOISES = 64, 8
PROBE_NOISES = 2  # on which the time is estimated
SEED = 2**31 - 1  # of the noise that profiles are measured on
WIDTHS = (None, 64, 32, 16, 8)
WHOLE_TOLS = (10.0, 2.0, 0.4, 0.1)  # in units of the family's default deviation
WINDOW_TOLS = (1.0, 0.2, 0.02, 0.002)  # windows deviate more at equal tol
FINEST = 0.002  # a deviation, in the same unit, below which a tighter tolerance is not measured
SEQUENTIAL = Method(width=1)
SETTINGS = ("width", "tol", "init", "unit", "precision")  # of a method, in a cell


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One method on one block."""

    width: int | None
    tol: float
    init: Init
    unit: Unit
    sweeps: tuple[int, ...]  # per noise, in ascending order
    deviation: float  # the largest |x - exact| of all noises; MAF: in standard deviations of the feature
    precision: Precision = "float32"
    guess_sweeps: tuple[int, ...] = ()  # per noise, in bfloat16

    @property
    def method(self) -> Method:
        return Method(**{name: getattr(self, name) for name in SETTINGS})


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What was measured with one guidance."""

    guidance: Guidance
    noises: int
    blocks: tuple[tuple[Cell, ...], ...]  # in sampling order
    left_out: str = ""  # what the time did not allow


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The entries of one set of weights."""

    weights: str  # their fingerprint
    entries: tuple[Entry, ...]

    def entry(self, guidance: Guidance) -> Entry | None:
        """What was measured with this guidance; others count as not measured."""
        return next((e for e in self.entries if e.guidance == guidance), None)

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """What `save` wrote; RecordError for any other text."""
        doc = parse_json(text)
        if not isinstance(doc, dict) or {key: doc.pop(key, None) for key in FORMAT} != FORMAT:
            raise RecordError(f"a profile is a JSON object with {FORMAT}")
        return build(cls, doc, "profile")

    def save(self, folder: Path) -> None:
        write_text(folder / FILE, json.dumps(FORMAT | asdict(self)) + "\n")

    @classmethod
    def load(cls, folder: Path) -> Profile | None:
        """What `save` wrote, if it is there and readable."""
        try:
            return cls.from_json(read_text(folder / FILE))
        except (OSError, ValueError):
            return None


@torch.no_grad()
def measure_profile(
    flow: Flow,
    guidance: Guidance | None = None,
    *,
    context: Tensor | None = None,
    noises: int = NOISES,
    seconds: float = math.inf,
    progress: Callable[[str], None] = lambda _: None,
) -> Entry | None:
    """Measure an entry for `flow.profile`, where it replaces one of the same guidance.

    context: rows that are taken in turn. seconds: about how long it may take; fewer noises come first, then
    fewer cells; None if they are not enough for the least of it. `left_out` says what was not measured.
    """
    guide, blocks, ladders = guidance or Guidance(), len(flow.blocks), list(_methods(flow))
    began, probes = perf_counter(), min(noises, PROBE_NOISES)
    _Study(flow, guide, context, probes)
    per_noise = (perf_counter() - began) / probes * (blocks + 1) / 2  # of a cell in every block
    if per_noise * FEWEST_NOISES > seconds:
        return None
    enough = seconds / max(per_noise * sum(map(len, ladders)), 1e-9)
    count = noises if enough >= noises else max(int(enough), FEWEST_NOISES)
    study = _Study(flow, guide, context, count)
    began, found, skipped = perf_counter(), list[tuple[Cell, ...]](), 0
    for i in range(blocks):
        progress(f"profile, block {i + 1} of {blocks}")
        cells, missing = study.block(i, ladders, deadline=began + seconds * (i + 1) / blocks)
        found.append(cells)
        skipped += missing
    notes = [f"{noises - count} of {noises} noises"] * (count < noises) + [f"{skipped} cells"] * bool(skipped)
    entry = Entry(guidance=guide, noises=count, blocks=tuple(found), left_out=", ".join(notes))
    known = flow.profile.entries if flow.profile and flow.profile.weights == flow.fingerprint() else ()
    flow.profile = Profile(weights=flow.fingerprint(), entries=(*(e for e in known if e.guidance != guide), entry))
    return entry


def _methods(flow: Flow) -> Iterator[list[Method]]:
    """Ladders of methods, the loosest tolerance of each width first."""
    calibrated = flow.guesses() is not None
    mixed = [Method(precision="mixed")] * (flow.default_unit == "absolute")
    for base in (*(Method(width=w) for w in WIDTHS), *mixed):
        if base.width is None or base.width < flow.sequence_shape[0]:
            tols = [float(f"{t * flow.default_deviation:.3g}") for t in (WINDOW_TOLS if base.width else WHOLE_TOLS)]
            yield [replace(base, tol=t).resolved(flow.default_unit, calibrated=calibrated) for t in tols]


class _Study:
    """Exact answers of some noises, and methods measured against them."""

    def __init__(self, flow: Flow, guidance: Guidance, context: Tensor | None, noises: int) -> None:
        labels, context, self.flow = flow.every_label(noises), in_turn(context, noises), flow
        self.stack = flow.bound_blocks(noises, labels=labels, context=context, guidance=guidance)
        self.inputs = [flow.to_prior(flow.noise(noises, SEED))]
        for block in self.stack:
            self.inputs.append(decode(block, self.inputs[-1], SEQUENTIAL).x)
        self.exact = flow.from_sequence(self.inputs[-1])
        self.unit = deviation_unit(flow, self.exact)

    def block(self, i: int, ladders: list[list[Method]], deadline: float) -> tuple[tuple[Cell, ...], int]:
        """The cells of block i, and how many were left out because the deadline had passed."""
        cells: list[Cell] = []
        for k, ladder in enumerate(ladders):
            if ladder[0].precision == "mixed" and self.stack[i].engine.rough() is None:
                continue
            for j, method in enumerate(ladder):
                if cells and perf_counter() > deadline:
                    return tuple(cells), sum(map(len, ladders[k:])) - j
                cells.append(self.cell(i, method))
                if cells[-1].deviation <= FINEST * self.flow.default_deviation:
                    break
        return tuple(cells), 0

    def cell(self, i: int, method: Method) -> Cell:
        """Block i by `method`, all later ones exactly."""
        out = decode(self.stack[i], self.inputs[i], method)
        stats, later = out.stats.blocks[0], self.stack[i + 1 :]
        x = self.flow.from_sequence(solve(later, out.x, [SEQUENTIAL] * len(later)))
        return Cell(
            **{name: getattr(method, name) for name in SETTINGS},
            sweeps=tuple(sorted(stats.sweeps.tolist())),
            deviation=min(deviation(x, self.exact, self.unit), sys.float_info.max),
            guess_sweeps=tuple(sorted(stats.guess_sweeps.tolist())) if method.precision == "mixed" else (),
        )


def deviation_unit(flow: Flow, exact: Tensor) -> Tensor | float:
    """What deviations are divided by: 1, or each feature's standard deviation for relative families."""
    if flow.default_unit == "absolute":
        return 1.0
    finite = exact[exact.isfinite().flatten(1).all(1)]
    spread = finite.std(0) if len(finite) > 1 else exact.new_ones(exact.shape[1:])
    return torch.where(spread > 0, spread, 1.0)


def deviation(x: Tensor, exact: Tensor, unit: Tensor | float) -> float:
    """The largest |x - exact| / unit over the samples that have a finite exact answer."""
    off = ((x - exact).abs() / unit)[exact.isfinite().flatten(1).all(1)]
    return float(off.nan_to_num(nan=math.inf).max()) if off.numel() else 0.0


def solve(stack: Iterable[Block], seq: Tensor, methods: Iterable[Method]) -> Tensor:
    """A sequence through these blocks, one method each."""
    for block, method in zip(stack, methods, strict=True):
        seq = decode(block, seq, method).x
    return seq


def in_turn(values: Any, rows: int) -> Any:
    """Rows of labels [k] or context [k, C] in turn; a single one stays as it is."""
    many = isinstance(values, Tensor) and values.ndim == 1 + values.is_floating_point() and len(values)
    return values[torch.arange(rows, device=values.device) % len(values)] if many else values
