"""Sweeps against training: the checkpoints that a run has kept, one after the other."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jacobiflow.core.types import JacobiflowError
from jacobiflow.flows.checkpoint import load
from jacobiflow_lab.analysis.layers import plain
from jacobiflow_lab.analysis.sweeps import Sweeps, sweeps

KEPT = re.compile(r"step-(\d+)")


class ProgressError(JacobiflowError, ValueError):
    """A folder without checkpoints to compare."""


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A checkpoint of a run."""

    step: int
    sweeps: Sweeps


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The checkpoints of a run, the earliest first."""

    moments: tuple[Moment, ...]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return plain(self)


def kept(folder: str | Path) -> list[tuple[int, Path]]:
    """Steps and checkpoints kept/step-* of a training run's folder, the earliest first."""
    root = Path(folder)
    root = root if root.name == "kept" else root / "kept"
    if not root.is_dir():
        return []
    found = ((KEPT.fullmatch(path.name), path) for path in root.iterdir())
    return sorted((int(match[1]), path) for match, path in found if match)


def progress(
    folder: str | Path,
    *,
    n: int = 16,
    seed: int = 0,
    labels: Callable[[int], torch.Tensor | None] = lambda classes: None,
    device: torch.device | str = "cpu",
    tol: float | None = None,
    say: Callable[[str], None] = lambda _: None,
    **options: Any,
) -> Progress:
    """Sweeps of every block, all swept ("uniform"), of each kept checkpoint, from the same noise.

    labels: the labels of the n samples of a flow of so many classes. options: those of `sweeps`.
    """
    found = kept(folder)
    if not found:
        raise ProgressError(f"{folder} keeps no checkpoints kept/step-*: train with training.keep_every > 0")
    moments = []
    for step, path in found:
        say(f"step {step}")
        flow = load(path, device=device)
        given = labels(flow.num_classes)
        condition: dict[str, Any] = {} if given is None else {"labels": given}
        z = flow.noise(n, seed)
        moments.append(Moment(step=step, sweeps=sweeps(flow, z, "uniform", tol=tol, **condition, **options)))
    return Progress(moments=tuple(moments))
