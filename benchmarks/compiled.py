"""compile=True against torch without it, and against the compiled C functions."""

from __future__ import annotations

import time

import torch

import jacobiflow as jf
from benchmarks.harness import Row, race
from benchmarks.roads import without_native


def rows(repeats: int) -> list[Row]:
    """The bundled `mnist`; `first_seconds` is what compiling cost, once for a batch size."""
    flow, found = jf.load("mnist"), []
    for n in (1, 16):
        z = flow.noise(n, seed=0)

        def torch_only(plan: str, compile: bool, z: torch.Tensor = z) -> torch.Tensor:
            with without_native():
                return flow.decode(z, plan, compile=compile).x

        for plan in ("sequential", "selective"):
            began = time.perf_counter()
            torch_only(plan, True)
            first = time.perf_counter() - began
            runs = {
                "torch": lambda plan=plan, run=torch_only: run(plan, False),
                "torch, compile=True": lambda plan=plan, run=torch_only: run(plan, True),
                "C functions": lambda plan=plan, z=z: flow.decode(z, plan).x,
            }
            exact = flow.decode(z, "sequential").x
            some = race("torch", runs, exact, repeats, batch=n, plan=plan)
            some[1]["compiling_seconds"] = first
            found += some
    return found
