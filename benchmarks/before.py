"""Times of an older commit, for the column "before" of `goals`. It runs under that commit's library and prints JSON.

Only what `goals` compares: single calls of the kernels on random weights, and whole decodings.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

COMMIT = "0abf79e"  # the last one before sweeps and batches were brought near the machine's limits
ROOT = Path(__file__).parent.parent
SHAPES = {
    "mnist": {"image_size": 28, "image_channels": 1, "patch_size": 2, "width": 128, "layers_per_block": 2},
    "cifar": {"image_size": 32, "image_channels": 3, "patch_size": 2, "width": 256, "layers_per_block": 6},
    "afhq": {"image_size": 256, "image_channels": 3, "patch_size": 8, "width": 768, "layers_per_block": 8},
}
CALLS = {  # by shape and batch: positions of a sweep, "whole" or "sequential"
    ("mnist", 1): ("whole", "sequential"),
    ("mnist", 16): ("whole", "sequential"),
    ("mnist", 64): ("sequential",),
    ("cifar", 1): ("1", "2", "4", "8", "16", "32", "64", "whole", "sequential"),
    ("cifar", 4): ("1", "2", "4", "8", "16", "whole", "sequential"),
    ("cifar", 16): ("1", "2", "4", "whole", "sequential"),
    ("cifar", 64): ("sequential",),
    ("afhq", 1): ("1", "2", "4", "8", "16", "32", "64", "whole", "sequential"),
}
ENOUGH_SECONDS, LONG_SECONDS = 0.03, 1.0


def seconds_of(runs: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float]:
    """Medians of alternating turns; long runs take three at most. Short ones repeat within a turn."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns):
        for name, run in runs.items():
            if turn >= 3 and times[name][0] > LONG_SECONDS:
                continue
            if not turn:
                run()
            own, began = list[float](), time.perf_counter()
            while not own or time.perf_counter() - began < ENOUGH_SECONDS:
                before = time.perf_counter()
                run()
                own.append(time.perf_counter() - before)
            times[name].append(statistics.median(own))
    return {name: statistics.median(found) for name, found in times.items()}


def made(shape: str) -> Any:
    """A block of random weights."""
    import jacobiflow as jf

    torch.manual_seed(0)
    flow = jf.TarFlow(jf.TarFlowConfig(blocks=1, **SHAPES[shape])).requires_grad_(False)  # type: ignore[arg-type]
    for p in flow.parameters():
        p += torch.randn_like(p) * 0.02
    return flow


def tame(shape: str, blocks: int) -> Any:
    """Random weights that sweeps solve about as fast as trained ones."""
    import jacobiflow as jf

    torch.manual_seed(0)
    flow = jf.TarFlow(jf.TarFlowConfig(blocks=blocks, **SHAPES[shape])).requires_grad_(False)  # type: ignore[arg-type]
    for name, p in flow.named_parameters():
        if p.ndim == 2 and "embed" not in name:
            p += 0.2 / p.shape[1] ** 0.5 * torch.randn(p.shape)
    return flow


def older_calls(flow: Any, batch: int, names: tuple[str, ...]) -> dict[str, Callable[[], object]]:
    """Sweeps from half of the length on, or of the whole sequence; and all positions one after the other."""
    block: Any = flow.bound_blocks(batch)[0][0]
    length, cache = block.length, block.new_cache(batch)
    x, z = torch.randn(2, batch, *flow.latent_shape)
    block.params(x, 0, length, cache)
    count = -(-batch // (block.rows or batch))
    parts = [(x[rows], z[rows], block.new_cache(len(rows))) for rows in torch.arange(batch).tensor_split(count)]

    def sweep(width: int) -> None:
        start = 1 if width == length - 1 else length // 2
        cache.valid = start - 1
        block.params(x, start, start + width, cache)

    def solve() -> None:
        for known, latent, kept in parts:
            kept.valid = 0
            block.single(known, latent, 1, length, kept)

    def call(name: str) -> Callable[[], object]:
        if name == "sequential":
            return solve
        width = length - 1 if name == "whole" else int(name)
        return lambda: sweep(width)

    return {name: call(name) for name in names}


def older_decodings(turns: int) -> dict[str, float]:
    """Whole decodings: `mnist`, and the CIFAR configuration on random weights."""
    from safetensors.torch import load_file

    import jacobiflow as jf

    folder, found = ROOT / "models/src/jacobiflow_models/mnist", dict[str, float]()
    config = json.loads((folder / "config.json").read_text())["config"]
    known = jf.TarFlowConfig.__dataclass_fields__
    mnist = jf.TarFlow(jf.TarFlowConfig(**{k: v for k, v in config.items() if k in known})).requires_grad_(False)
    mnist.load_state_dict({k: v.float() for k, v in load_file(folder / "model.safetensors").items()})
    for n in (1, 16):
        z, labels = mnist.noise(n, seed=0), torch.arange(n) % 10
        plans = {"sequential": "sequential", "selective": "selective"}
        runs = {k: lambda p=p: mnist.decode(z, p, labels=labels) for k, p in plans.items()}  # noqa: B023
        found |= {f"mnist flow/{n}/{k}": v for k, v in seconds_of(runs, turns).items()}
    cifar = tame("cifar", 6)
    five = jf.Method(max_sweeps=5)
    plans = {
        "sequential": jf.Plan.sequential(6),
        "first": jf.Plan((jf.Method(width=1), *[five] * 5)),
        "five": jf.Plan((five,) * 6),
    }
    for n in (1, 4, 16):
        z = cifar.noise(n, seed=0)
        runs = {k: lambda p=p: cifar.decode(z, p, on_failure="return") for k, p in plans.items()}  # noqa: B023
        found |= {f"cifar flow/{n}/{k}": v for k, v in seconds_of(runs, turns).items()}
    return found


def times(turns: int) -> dict[str, float]:
    """What `python -m benchmarks.before` prints under the older library; empty if that commit is not there."""
    archive = subprocess.run(["git", "archive", COMMIT, "src"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        env = os.environ | {"PYTHONPATH": f"{folder}/src", "JACOBIFLOW_CACHE": f"{folder}/cache"}
        command = [sys.executable, str(Path(__file__)), str(turns)]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    turns = int(sys.argv[1])
    with torch.inference_mode():
        found = {
            f"{shape}/{batch}/{name}": seconds
            for (shape, batch), names in CALLS.items()
            for name, seconds in seconds_of(older_calls(made(shape), batch, names), turns).items()
        }
        found |= older_decodings(turns)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
