"""Progress of a job over all of its processes, read from its folder."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jacobiflow.core.progress import progress_bar
from jacobiflow.jobs.manifest import Job
from jacobiflow.jobs.shards import RECORDS

POLL_SECONDS = 1.0  # between looks at the folder


def finished_samples(folder: Path, job: Job) -> int:
    """How many samples are finished."""
    with os.scandir(folder / RECORDS) as entries:
        return min(job.settings.n, job.shard * sum(e.name.endswith(".json") for e in entries))


@contextmanager
def progress(folder: Path, job: Job) -> Iterator[None]:
    """Show how many samples are finished, from a thread that watches the folder."""
    over = threading.Event()

    def watch() -> None:
        total, first = job.settings.n, finished_samples(folder, job)
        with progress_bar(total=total, initial=first, unit=" samples", smoothing=0) as bar:
            while not over.wait(POLL_SECONDS):
                bar.update(finished_samples(folder, job) - bar.n)
            bar.update(finished_samples(folder, job) - bar.n)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
