"""What a run tells while it runs."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from jacobiflow.core.files import write_atomically
from jacobiflow.core.types import JacobiflowError


class Log:
    """log.jsonl, one object a line; for people a bar on a terminal, plain lines elsewhere.

    A run that goes on from `step` drops the lines that it will write again.
    """

    def __init__(self, folder: Path, *, step: int, total: int, tensorboard: bool) -> None:
        self.path = folder / "log.jsonl"
        self.board = _board(folder / "tensorboard", step) if tensorboard else None
        kept = "".join(line for line in _lines(self.path) if _step(line) <= step)
        write_atomically(self.path, lambda name: Path(name).write_text(kept, encoding="utf-8"))
        self.terminal = sys.stderr.isatty()
        self.bar = tqdm(total=total, initial=step, unit="step", dynamic_ncols=True, disable=not self.terminal)
        self.shown: dict[str, str] = {}

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.board is not None:
            self.board.close()

    def advance(self) -> None:
        """One step more on the bar."""
        self.bar.update()

    def write(self, *, step: int, epoch: float, **values: float) -> None:
        """These values after `step` steps; JSON has no infinity and no NaN: they are null."""
        entry = {"step": step, "epoch": epoch, **values}
        plain = {k: v if math.isfinite(v) else None for k, v in entry.items()}
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(plain) + "\n")
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
        if self.terminal:
            self.shown |= {k: f"{v:.4g}" for k, v in values.items() if k in ("loss", "validation")}
            if "rate" in values:
                self.shown["images/s"] = f"{values['rate']:.0f}"
            self.bar.set_postfix(self.shown)
        else:
            print(" ".join(f"{k}={v:.6g}" for k, v in entry.items()), file=sys.stderr, flush=True)


def last(folder: Path) -> dict[str, float | None]:
    """What was logged at the last step, in one."""
    entries = [json.loads(line) for line in _lines(folder / "log.jsonl")]
    end = max((e["step"] for e in entries), default=0)
    return {k: v for e in entries if e["step"] == end for k, v in e.items()}


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []


def _step(line: str) -> float:
    """The step that a line is about; a line that was cut off is of no step."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _board(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise JacobiflowError("TensorBoard is missing: pip install 'jacobiflow[tensorboard]'") from None
    return SummaryWriter(str(folder), purge_step=step + 1)
