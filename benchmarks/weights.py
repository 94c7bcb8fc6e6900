"""What it costs to look at every byte of the weights in each call, against the solve itself.

`check` is the time of a call with the look less that of a call without it, both as users make them.
`checksum` is the look by itself and `read` a sum of the same bytes as whole numbers, both on one thread,
and after a solve, which leaves other things in the caches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import jacobiflow as jf
from benchmarks.harness import Row, cells
from benchmarks.peers import NflowsMAF
from jacobiflow.flows.weights import WeightMemo, tensors_of
from jacobiflow.kernels.checksum import Memory, Running


def rows(repeats: int) -> list[Row]:
    """TarFlow and MAF of the package, and flows of nflows and zuko that are accelerated."""
    found = []
    for (name, batch), make in SUBJECTS.items():
        model, run = make(batch)
        row = {"model": name, "batch": batch} | measured(model, run, repeats)
        print("   ", cells(row), flush=True)
        found.append(row)
    return found


def measured(model: nn.Module, run: Callable[[], Tensor], repeats: int) -> Row:
    """Medians over pairs of runs, with and without the look, side by side."""
    run()
    with unchecked():
        run()
    calls, pairs = 8, []
    for _ in range(repeats):
        checked = seconds(run, calls)
        with unchecked():
            pairs.append((checked, seconds(run, calls)))
    solve = statistics.median(without for _, without in pairs)
    check = statistics.median(checked - without for checked, without in pairs)
    tensors = list(tensors_of(model))
    memory = Memory([tensors])
    words = [_words(t) for t in tensors]
    read = after(run, lambda: [w.sum() for w in words], repeats)
    return {
        "weights_bytes": sum(t.nbytes for t in tensors),
        "solve_seconds": solve,
        "check_seconds": check,
        "check_share": check / solve,
        "checksum_seconds": after(run, lambda: Running(memory, 0).end(), repeats),
        "read_seconds": read,
        "check_per_read": check / read,
    }


def after(run: Callable[[], object], look: Callable[[], object], repeats: int) -> float:
    """Seconds of `look`, each time after a solve."""
    times = []
    with unchecked():
        for _ in range(4 * repeats):
            run()
            times.append(seconds(look, 1))
    return statistics.median(times)


def seconds(run: Callable[[], object], calls: int) -> float:
    """Of one call."""
    began = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - began) / calls


@contextmanager
def unchecked() -> Iterator[None]:
    """Calls take the weights for unchanged."""
    solve = WeightMemo.solve

    def trusting(self: WeightMemo, groups: Any, make: Any, use: Any, **options: Any) -> Any:
        if self._seen is None:
            return solve(self, groups, make, use, **options)
        return self._using([(watch, ()) for watch, _ in groups], self._seen, use)

    WeightMemo.solve = trusting  # type: ignore[method-assign]
    try:
        yield
    finally:
        WeightMemo.solve = solve  # type: ignore[method-assign]


def _words(t: Tensor) -> Any:
    """The bytes as whole numbers of 64 bits, but for the last few."""
    flat = t.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return flat[: len(flat) // 8 * 8].view("int64")


Subject = tuple[nn.Module, Callable[[], Tensor]]


def _bundled(name: str, plan: str) -> Callable[[int], Subject]:
    def make(n: int) -> Subject:
        flow = jf.load(name)
        z = flow.noise(n, seed=0)
        return flow, lambda: flow.decode(z, plan).x

    return make


def _nflows(n: int) -> Subject:
    flow = jf.load("mnist-maf")
    assert isinstance(flow, jf.MAF)
    peer, z = jf.accelerate(NflowsMAF(flow)), flow.noise(n, seed=0)
    return peer, lambda: peer.inverse(z)


def _zuko(n: int) -> Subject:
    import zuko

    torch.manual_seed(0)
    flow = jf.accelerate(zuko.flows.NSF(128, transforms=5, hidden_features=(128, 128)))
    z = torch.randn(n, 128)

    @torch.no_grad()
    def inverse() -> Tensor:
        return flow().transform.inv(z)

    return flow, inverse


SUBJECTS: dict[tuple[str, int], Callable[[int], Subject]] = {
    ("mnist-small", 1): _bundled("mnist-small", "selective"),
    ("mnist-small", 16): _bundled("mnist-small", "selective"),
    ("cifar10-cpu", 1): _bundled("cifar10-cpu", "selective"),
    ("mnist-maf", 1): _bundled("mnist-maf", "sequential"),
    ("mnist-maf", 100): _bundled("mnist-maf", "sequential"),
    ("nflows MAF, accelerated", 1): _nflows,
    ("nflows MAF, accelerated", 100): _nflows,
    ("zuko NSF, accelerated", 1): _zuko,
    ("zuko NSF, accelerated", 100): _zuko,
}
