"""How far results differ that should be equal: `python -m benchmarks.numerics [MODEL ...]`.

1,000 noises per bundled model are decoded sequentially, which is exact but for rounding, in several ways.
Each is compared with float32, the C kernels, batches of 256 and one thread. Prints the largest, the 99th
percentile and the median over samples of the largest |difference| of x and of that of log_det, and how many
samples are equal in bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

import jacobiflow as jf

SAMPLES = 1000
AVX2 = "cc -mno-avx512f"  # the option counts wherever -march stands


def decode(name: str, batch: int, dtype: torch.dtype, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """x [N, D] and log_det [N] in float64."""
    flow = jf.load(name, dtype=dtype)
    z = flow.noise(SAMPLES, seed=0).to(dtype)
    xs, dets = [], []
    for start in range(0, SAMPLES, batch):
        part = z[start : start + batch]
        labels = (start + torch.arange(len(part))) % flow.num_classes if flow.num_classes else None
        out = flow.decode(part, "sequential", labels=labels, warn=False, **options)
        xs.append(out.x.flatten(1).double())
        dets.append(out.log_det.double())
    return torch.cat(xs).numpy(), torch.cat(dets).numpy()


def elsewhere(name: str) -> tuple[np.ndarray, np.ndarray]:
    """The same by kernels that are built without AVX-512."""
    with TemporaryDirectory() as folder:
        path = f"{folder}/out.npz"
        environment = os.environ | {"CC": AVX2, "JACOBIFLOW_CACHE": f"{folder}/cache"}
        command = [sys.executable, "-m", "benchmarks.numerics", "--save", name, path]
        subprocess.run(command, check=True, env=environment)
        with np.load(path) as file:
            return file["x"], file["log_det"]


def threads(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    torch.set_num_threads(count)
    try:
        return decode(name, 256, torch.float32)
    finally:
        torch.set_num_threads(1)


WAYS: dict[str, Callable[[str], tuple[np.ndarray, np.ndarray]]] = {
    "float64": lambda name: decode(name, 256, torch.float64),
    "batches of 1": lambda name: decode(name, 1, torch.float32),
    "2 threads": lambda name: threads(name, 2),
    "torch instead of C": lambda name: decode(name, 256, torch.float32, backend="torch"),
    "C without AVX-512": elsewhere,
    "the same again": lambda name: decode(name, 256, torch.float32),
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        x, log_det = decode(name, 256, torch.float32)
        for way, run in WAYS.items():
            other, det = run(name)
            row: dict[str, Any] = {"model": name, "against": way}
            apart = {"x": np.abs(other - x).max(1), "log_det": np.abs(det - log_det)}
            for what, values in apart.items():
                for which, share in (("largest", 1.0), ("99%", 0.99), ("median", 0.5)):
                    row[f"{what} {which}"] = f"{np.quantile(values, share):.1e}"
            row["equal"] = int(((apart["x"] == 0) & (apart["log_det"] == 0)).sum())
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--save"]:
        torch.set_num_threads(1)
        x, log_det = decode(sys.argv[2], 256, torch.float32)
        np.savez(sys.argv[3], x=x, log_det=log_det)
    else:
        main(sys.argv[1:] or ["mnist", "mnist-small", "mnist-maf", "cifar10-cpu", "cifar100-cpu", "ising-16"])
