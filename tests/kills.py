"""Kills a job and a training at random moments, resumes them each time, and compares the final bytes.

`python tests/kills.py 50` kills each 50 times, half of them as one process and half as two. A kill is SIGKILL
or SIGTERM, of one process or of all. An uninterrupted run must leave the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from leftovers import files
from soak import RECIPE
from subjects import tarflow
from zygote import Zygote

SHARDS, SAMPLES = 200, 4
STEPS = 300


def job_progress(out: Path) -> float:
    """The finished share of a job."""
    return len(list(out.glob("records/*.json"))) / SHARDS


def training_progress(out: Path) -> float:
    """The finished share of a training."""
    log = out / "log.jsonl"
    return log.read_text().count('"loss"') / STEPS if log.exists() else 0.0


def weights(out: Path) -> dict[str, str]:
    """State and model of a training, by content."""
    names = ("state.safetensors", "model/model.safetensors", "model/config.json")
    return {name: hashlib.sha256((out / name).read_bytes()).hexdigest() for name in names}


def survive(
    zygote: Zygote,
    args: tuple[object, ...],
    folder: Path,
    processes: int,
    kills: int,
    progress: Callable[[Path], float],
    content: Callable[[Path], dict[str, str]],
) -> Counter[str]:
    """Kill a command so many times, then let it end. Returns how often it was killed how."""
    draw, done, out = random.Random(), Counter[str](), folder / "out"
    for moment in sorted(draw.random() * 0.9 for _ in range(kills)):
        pids = zygote.start(*args, "--out", out, processes=processes)
        deadline = time.monotonic() + 120
        while progress(out) < moment:
            assert time.monotonic() < deadline, zygote.log.read_text()
            time.sleep(0.001)
        time.sleep(draw.random() * 0.05)
        number = draw.choice([signal.SIGKILL, signal.SIGTERM])
        victims = draw.choice([pids, pids[:1], pids[-1:]])
        for pid in victims:
            os.kill(pid, number)
        time.sleep(draw.choice([0.0, 1.0]))
        for pid in set(pids) - set(victims):  # as torchrun does, at once or when it has noticed by itself
            os.kill(pid, signal.SIGTERM)
        ends = [end.status for end in zygote.wait(pids)]
        done[f"{number.name} of {len(victims)} of {processes}"] += any(ends)
        assert "Traceback" not in zygote.log.read_text(), zygote.log.read_text()
    assert progress(out) < 1
    for place in (out, folder / "whole"):
        ends = [end.status for end in zygote.wait(zygote.start(*args, "--out", place, processes=processes))]
        assert not any(ends), zygote.log.read_text()
    assert content(out) == content(folder / "whole")
    return done


def main(kills: int) -> None:
    with TemporaryDirectory() as place, Zygote(Path(place) / "log") as zygote:
        folder = Path(place)
        np.savez(folder / "tiny.npz", x=np.arange(64 * 64, dtype=np.uint8).reshape(64, 8, 8))
        (folder / "tiny.toml").write_text(RECIPE.replace("epochs = 2", f"epochs = {STEPS // 3}"))
        flags = "--data.validation 0.2 --training.log-every 1 --training.save-every 7 --training.validate 0"
        tarflow(0.25, num_classes=3).save(folder / "model")
        job = ("sample", folder / "model", "-n", SHARDS * SAMPLES, "--shard", SAMPLES, "--format", "npz")
        training = ("train", folder / "tiny.toml", "--data.source", folder / "tiny.npz", *flags.split())
        for name, args, progress, content in (
            ("job", job, job_progress, files),
            ("training", training, training_progress, weights),
        ):
            total = Counter[str]()
            for processes in (1, 2):
                part = folder / f"{name}{processes}"
                total += survive(zygote, args, part, processes, kills // 2, progress, content)
            print(f"{name}: {total.total()} kills, equal bytes: {dict(sorted(total.items()))}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
