"""Mixed work for as many seconds as it is told, and how memory, threads and open files went.

The work: samples at changing batch sizes (the second argument is the largest) and plans, likelihoods, jobs in
shards and short trainings. First comes the largest batch in every way. The warm-up ends with the first tenth
of the time, and growth is counted from there:

peak: the most that was ever held, before and at the end of each tenth of the time;
kept: what is held between draws at those moments, once the allocator has given back what it keeps for later;
threads, files: of the process, at those moments.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import jacobiflow as jf
from jacobiflow.cli.main import main

MODEL = """
[model]
image_size = 8
image_channels = 1
patch_size = 4
width = 16
head_dim = 16
blocks = 2
layers_per_block = 1
noise_std = 0.1
"""
RECIPE = f"""{MODEL}
[training]
epochs = 2
batch_size = 16
"""
WINDOWS = jf.Method(width=8, tol=1e-3)


def kept() -> int:
    """Bytes of memory that this process cannot do without."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """The most bytes that this process ever held."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def entries(folder: str) -> int:
    """How many threads (task) or open files (fd) this process has."""
    return len(list(Path("/proc/self", folder).iterdir()))


def kinds(folder: Path) -> Iterator[Callable[[int, int], object]]:
    """Functions of a batch size and a seed, one per kind of work."""
    image, vector = jf.load("mnist-small"), jf.load("mnist-maf")

    def sample(flow: jf.Flow, **options: Any) -> Callable[[int, int], object]:
        return lambda n, seed: flow.sample(n, seed=seed, **options)

    for flow in (image, vector):
        for plan in ("sequential", "uniform", "selective", jf.Plan((WINDOWS,) * len(flow.blocks))):
            yield sample(flow, plan=plan)
    yield sample(image, labels=3, guidance=1.5)
    yield sample(image, labels=3, denoise=True)
    yield lambda n, seed: vector.decode(vector.noise(n, seed), "uniform", check=True, cache=False)
    yield sample(vector, tol=1e-2, init="noise")
    yield lambda n, seed: image.log_prob(image.sample(n, labels=3, seed=seed).x, labels=3)
    np.savez(folder / "tiny.npz", x=np.arange(64 * 64, dtype=np.uint8).reshape(64, 8, 8))
    (folder / "tiny.toml").write_text(RECIPE)

    def command(*args: object) -> None:
        """A command is a process of its own: a fork of this one, which has used the kernels."""
        out, child = folder / "out", os.fork()
        if child == 0:
            with redirect_stderr(StringIO()), redirect_stdout(StringIO()):
                os._exit(main([*map(str, args), "--out", str(out)]))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        shutil.rmtree(out)

    yield lambda n, seed: command("sample", "mnist-small", "-n", n, "--seed", seed, "--format", "npz")
    source = ("--data.source", folder / "tiny.npz")
    yield lambda n, seed: command("train", folder / "tiny.toml", *source, "--training.seed", seed)


def soak(seconds: float, batch: int, folder: Path) -> None:
    torch.set_num_threads(1)
    draw, every, draws, samples = random.Random(0), list(kinds(folder)), 0, 0
    measures = {
        "peak": peak,
        "kept": kept,
        "threads": lambda: entries("task"),
        "files": lambda: entries("fd"),
    }
    for _ in range(2):
        for work in every:
            work(batch, 0)
    found = {name: [measure()] for name, measure in measures.items()}
    began, worked = time.monotonic(), time.process_time()
    for tenth in range(1, 11):
        while time.monotonic() < began + seconds * tenth / 10:
            count = draw.randint(1, batch)
            draw.choice(every)(count, draws)
            draws, samples = draws + 1, samples + count
        for name, measure in measures.items():
            found[name].append(measure())
        print(found, file=sys.stderr, flush=True)
    growth = {name: max(values) / values[1] - 1 for name, values in found.items()}
    about = {
        "seconds": seconds,
        "processor": time.process_time() - worked,
        "draws": draws,
        "samples": samples,
    }
    print(json.dumps(about | found | {"growth": growth}))


if __name__ == "__main__":
    with TemporaryDirectory() as place:
        soak(float(sys.argv[1]), int(sys.argv[2]), Path(place))
