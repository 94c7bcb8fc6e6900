"""Times of sweeps in the C kernels beside the machine's limits: `python -m benchmarks.kernels mnist cifar`.

One block with random weights, windows of w positions from half of the length on, the shortest of many runs.
The bound of a call is max(bytes / reading speed, operations / peak), both measured in the same run. Bytes are
the weights, and the keys and values that are read; their reading speed is measured on as many bytes. Sweeps
in bfloat16 are beside the bound of float32.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_double, c_long, c_void_p
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch

import jacobiflow as jf
from benchmarks.before import SHAPES, made
from benchmarks.harness import matmul_speed
from jacobiflow.core.hardware import busy_elsewhere

SECONDS = 0.5  # of a measurement of the machine
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-Wno-psabi")


@dataclass(frozen=True)
class Machine:
    """What all threads together reach, by `machine.c`."""

    lib: ctypes.CDLL
    pool: ThreadPoolExecutor
    threads: int

    @classmethod
    def built(cls, threads: int) -> Machine:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "machine.so"
            subprocess.run(["cc", *FLAGS, str(Path(__file__).with_name("machine.c")), "-o", out], check=True)
            lib = ctypes.CDLL(str(out))
        lib.multiplying.restype = lib.reading.restype = c_double
        lib.multiplying.argtypes = [c_long, c_double]
        lib.reading.argtypes = [c_void_p, c_long, c_double]
        return cls(lib, ThreadPoolExecutor(threads), threads)

    @cache  # noqa: B019
    def peak(self) -> float:
        """Operations per second."""
        count = 20_000
        took = self.pool.map(lambda _: self.lib.multiplying(count, SECONDS), range(self.threads))
        return sum(count * 24 * 32 / seconds for seconds in took)

    @cache  # noqa: B019
    def reading(self, size: int) -> float:
        """Bytes per second that are read again and again out of so many, each thread its own part."""
        part = max(128, size // 4 // self.threads)
        numbers = torch.zeros(self.threads, part)
        took = self.pool.map(lambda row: self.lib.reading(row.data_ptr(), part, SECONDS), numbers)
        return sum(4 * part / seconds for seconds in took)


@dataclass(frozen=True)
class Case:
    """A block of random weights with `batch` samples."""

    machine: Machine
    flow: jf.TarFlow
    batch: int

    @property
    def weights(self) -> int:
        sizes = ((name, p) for name, p in self.flow.named_parameters() if "embed" not in name)
        return sum(p.numel() for _, p in sizes if p.ndim == 2)

    def limits(self, start: int, width: int) -> tuple[float, float, float]:
        """Operations, bytes and the least seconds of one sweep of `width` positions from `start` on."""
        config = self.flow.config
        per_key = 4 * config.width * config.layers_per_block
        operations = 2 * self.weights * width + per_key * sum(range(start, start + width))
        cached = 2 * per_key * (start + width) if start > 1 else 0  # a whole sweep makes its own
        size = 4 * self.weights + self.batch * cached
        bound = max(self.batch * operations / self.machine.peak(), size / self.machine.reading(_rounded(size)))
        return self.batch * operations, size, bound


def _rounded(size: float) -> int:
    """Sizes within a tenth of each other are measured once."""
    step = 1 << max(0, int(size).bit_length() - 4)
    return max(1, round(size / step)) * step


def shortest(run: Callable[[], object], seconds: float, least: int = 3) -> float:
    """Seconds of the shortest run, among those that fit into so many seconds."""
    best, began, turns = float("inf"), time.perf_counter(), 0
    run()
    while turns < least or time.perf_counter() - began < seconds:
        before = time.perf_counter()
        run()
        best, turns = min(best, time.perf_counter() - before), turns + 1
    return best


def line(name: str, seconds: float, limits: tuple[float, float, float], one: float = 0.0) -> None:
    operations, size, bound = limits
    times = f"{seconds / one:8.2f}x one" if one else ""
    print(
        f"  {name:>14}: {seconds * 1e3:9.3f} ms {operations / seconds / 1e9:7.0f} GFLOPS "
        f"{size / seconds / 1e9:7.1f} GB/s {seconds / bound:6.2f}x bound{times}",
        flush=True,
    )


@torch.no_grad()
def sweeps(case: Case, widths: list[int], seconds: float) -> None:
    """Windows from half of the length on, a whole sweep, and all positions one after the other."""
    batch = case.batch
    block = case.flow.bound_blocks(batch, backend="c")[0]
    length, engine, store = block.length, block.engine, block.engine.new_cache(batch)
    x, z = torch.randn(2, batch, *case.flow.latent_shape)
    one = 0.0
    for width in [*widths, length - 1]:
        start = 1 if width == length - 1 else length // 2
        engine.params(x, 1, start, store)
        took = shortest(partial(engine.params, x, start, width, store), seconds)
        line("whole sweep" if start == 1 else f"w {width}", took, case.limits(start, width), one)
        one = one or took
    rough = engine.rough()
    for width, start in ((16, length // 2), (length - 1, 1)) if rough is not None else ():
        store16 = rough.new_cache(batch)
        rough.params(x, 1, start, store16)
        took = shortest(partial(rough.params, x, start, width, store16), seconds)
        name = "whole" if start == 1 else f"w {width}"
        line(f"{name} bfloat16", took, case.limits(start, width), one)
    slopes = torch.empty(batch, length)
    took = shortest(partial(engine.solve, x, z, slopes, 1, length, store), seconds, 1)
    steps = [case.limits(t, 1) for t in range(1, length)]
    line("sequential", took, (sum(s[0] for s in steps), sum(s[1] for s in steps), sum(s[2] for s in steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), help=", ".join(SHAPES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=0.5, help="of runs per figure, at least")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = Machine.built(args.threads)
    speeds = ", ".join(f"{n} MB {machine.reading(n << 20) / 1e9:.0f}" for n in (1, 4, 19, 227))
    print(
        f"{args.threads} threads: peak {machine.peak() / 1e9:.0f} GFLOPS, torch's matrix product "
        f"{matmul_speed() / 1e9:.0f}; GB/s of {speeds}"
    )
    began, others = time.perf_counter(), busy_elsewhere()
    for shape in args.shapes:
        for batch in args.batch:
            case = Case(machine, made(shape), batch)
            print(f"{shape}, batch {batch}, {4 * case.weights / 1e6:.1f} MB of weights", flush=True)
            sweeps(case, args.widths, args.seconds)
    print(f"others kept {(busy_elsewhere() - others) / (time.perf_counter() - began):.2f} cores busy")


if __name__ == "__main__":
    main()
