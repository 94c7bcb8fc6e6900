"""The backends of a TarFlow: torch.compile against torch, and against the C kernels."""

from __future__ import annotations

import time

import torch

import jacobiflow as jf
from benchmarks.harness import Row, race
from jacobiflow.kernels.backend import Backend


def rows(repeats: int) -> list[Row]:
    """The bundled `mnist-small`; `first_seconds` is what compiling cost, once for a batch size."""
    flow, found = jf.load("mnist-small"), []
    for n in (1, 16):
        z = flow.noise(n, seed=0)

        def run(plan: str, backend: Backend | None, z: torch.Tensor = z) -> torch.Tensor:
            return flow.decode(z, plan, backend=backend).x

        for plan in ("sequential", "selective"):
            began = time.perf_counter()
            run(plan, "compile")
            first = time.perf_counter() - began
            runs = {
                "torch": lambda plan=plan, run=run: run(plan, "torch"),
                "compile": lambda plan=plan, run=run: run(plan, "compile"),
                "C kernels": lambda plan=plan, run=run: run(plan, None),
            }
            exact = flow.decode(z, "sequential").x
            some = race("torch", runs, exact, repeats, batch=n, plan=plan)
            some[1]["compiling_seconds"] = first
            found += some
    return found
