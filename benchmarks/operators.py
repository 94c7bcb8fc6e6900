"""Where the time of decoding goes: inside the compiled functions, and around them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

import jacobiflow as jf
from benchmarks.harness import Row, floor
from jacobiflow.kernels import build

FUNCTIONS = {
    "jf_params": "network",
    "jf_masked": "network",
    "jf_solve": "network",  # with the elementwise map, one position after the other
    "jf_masked_solve": "network",  # the same
    "jf_affine": "elementwise",
}


@contextmanager
def timed() -> Iterator[Counter[str]]:
    """Seconds spent in the compiled functions."""
    lib, spent = build.library(), Counter[str]()
    assert lib is not None

    def wrap(name: str, function: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            out = function(*args)
            spent[FUNCTIONS[name]] += time.perf_counter() - began
            spent["calls"] += 1
            return out

        return run

    originals = {name: getattr(lib, name) for name in FUNCTIONS}
    for name, function in originals.items():
        setattr(lib, name, wrap(name, function))
    try:
        yield spent
    finally:
        for name, function in originals.items():
            setattr(lib, name, function)


def rows(repeats: int) -> list[Row]:
    """Shares of time of the bundled TarFlow and MAF at four batch sizes."""
    found: list[Row] = []
    for model, plans in (
        ("mnist-small", ("sequential", "selective")),
        ("mnist-maf", ("sequential", "selective")),
    ):
        flow = jf.load(model)
        for n in (1, 16, 64, 256):
            z = flow.noise(n, seed=0)
            condition = {"labels": torch.arange(n) % 10} if flow.num_classes else {}
            for plan in plans:
                flow.decode(z, plan, **condition)
                turns = max(1, repeats // 2)
                with timed() as spent:
                    began = time.perf_counter()
                    for _ in range(turns):
                        flow.decode(z, plan, **condition)
                    seconds = time.perf_counter() - began
                network, small = spent["network"] / seconds, spent["elementwise"] / seconds
                row: Row = {"model": model, "batch": n, "plan": plan, "seconds": seconds / turns}
                row |= {
                    "network_share": network,
                    "elementwise_share": small,
                    "python_share": 1 - network - small,
                }
                row["calls"] = round(spent["calls"] / turns)
                row |= {"floor": floor(flow, n), "distance": seconds / turns / floor(flow, n)}
                print("   ", row, flush=True)
                found.append(row)
    return found
