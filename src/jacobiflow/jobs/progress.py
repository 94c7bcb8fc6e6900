"""Progress of a job over all of its processes, seen in its folder."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from jacobiflow.jobs.manifest import Job
from jacobiflow.jobs.shards import RECORDS

LOOK = 1.0  # seconds between looks at the folder
TELL = 30.0  # seconds between lines where there is no terminal


def done(folder: Path, job: Job) -> int:
    """How many samples are finished."""
    with os.scandir(folder / RECORDS) as entries:
        return min(job.settings.n, job.shard * sum(e.name.endswith(".json") for e in entries))


class Progress:
    """A bar on a terminal, a line now and then elsewhere; looks at the folder in a thread of its own."""

    def __init__(self, folder: Path, job: Job) -> None:
        self.folder, self.job = folder, job
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Progress:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.over.set()
        self.thread.join()

    def _watch(self) -> None:
        total, first, began = self.job.settings.n, done(self.folder, self.job), time.monotonic()
        terminal, told = sys.stderr.isatty(), began
        with tqdm(
            total=total,
            initial=first,
            unit="sample",
            dynamic_ncols=True,
            smoothing=0,  # shards come in steps: only the mean rate says how long it will take
            disable=not terminal,
        ) as bar:
            while not self.over.wait(LOOK):
                count, now = done(self.folder, self.job), time.monotonic()
                bar.update(count - bar.n)
                if not terminal and now - told >= TELL:
                    told = now
                    print(line(count, total, (count - first) / (now - began)), file=sys.stderr, flush=True)
            bar.update(done(self.folder, self.job) - bar.n)


def line(count: int, total: int, rate: float) -> str:
    """Progress in words.

    >>> line(2048, 10_000, 16.0)
    '2,048 of 10,000 samples, 16.0 a second, 8 min left'
    """
    text = f"{count:,} of {total:,} samples"
    if rate <= 0:
        return text
    left = (total - count) / rate
    span = (
        f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
    )
    return f"{text}, {rate:.1f} a second, {span} left"
