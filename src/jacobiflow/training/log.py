"""The log of a training run."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from jacobiflow.core.files import write_text
from jacobiflow.core.progress import in_time, pace, progress_bar
from jacobiflow.core.records import as_json
from jacobiflow.core.results import JacobiflowError
from jacobiflow.core.tables import pip_install

TIMED = 2  # steps whose time gives the estimate; the one before them warms up
WORTH_SAYING = 60.0  # seconds


class Log(AbstractContextManager[Any]):
    """log.jsonl, one object per line, of which a run that resumes from `step` drops the later ones; and a bar."""

    def __init__(self, folder: Path, step: int, total: int, *, tensorboard: bool) -> None:
        self.path = folder / "log.jsonl"
        self.board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                raise JacobiflowError(f"TensorBoard is missing: {pip_install('[tensorboard]')}") from None
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
        write_text(self.path, "".join(f"{json.dumps(e)}\n" for e in entries(folder) if e["step"] <= step))
        self.bar = progress_bar(total=total, initial=step, unit="step")
        self.shown: dict[str, str] = {}
        self.since, self.images = perf_counter(), 0  # for the rate
        self.left, self.steps, self.first = total - step, 0, 0.0  # for the estimate

    def __exit__(self, *_: object) -> None:
        self.bar.close()
        if self.board is not None:
            self.board.close()

    def advance(self, images: int, loss: float) -> None:
        """Count one step of so many images. The first steps tell how long all of them take."""
        self.shown["loss"] = f"{loss:.4g}"
        self.images += images
        self.steps += 1
        if self.steps == 1:
            self.first = perf_counter()
        elif self.steps == 1 + TIMED:
            each, left = (perf_counter() - self.first) / TIMED, self.left - self.steps
            if each * left >= WORTH_SAYING:
                said = f"about {in_time(each * left)} for {left:,} steps, {pace(1 / each, 'step')}"
                self.bar.write(said, file=sys.stderr)

    def rate(self) -> float:
        """Images per second since the last call."""
        now = perf_counter()
        rate = self.images / (now - self.since)
        self.since, self.images = now, 0
        return rate

    def write(self, *, step: int, epoch: float, **values: float) -> None:
        """Log the values, if there are any, after `step` steps, and show the step. What is not finite becomes null."""
        if values:
            with self.path.open("a", encoding="utf-8") as f:
                f.write(f"{json.dumps(as_json({'step': step, 'epoch': epoch, **values}))}\n")
        for name, value in values.items() if self.board is not None else ():
            self.board.add_scalar(name, value, step)
        self.shown |= {k: f"{v:.4g}" for k, v in values.items() if k in ("loss", "validation", "rate")}
        self.bar.set_postfix(self.shown, refresh=False)
        if not self.bar.update() and values:  # a step is shown once
            self.bar.refresh()


def entries(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log, but for one that was cut off."""
    path, found = folder / "log.jsonl", []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        with suppress(ValueError):
            found.append(json.loads(line))
    return found
