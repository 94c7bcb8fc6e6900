"""MAF and NSF against nflows and zuko, on the same weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

import jacobiflow as jf
from benchmarks.harness import Row, floor, matmul_speed, median, one_sweep, race
from benchmarks.peers import NflowsMAF


def nflows_rows(repeats: int, n: int) -> list[Row]:
    """`mnist-maf`, whose bound is a deviation of 1e-4."""
    flow = jf.load("mnist-maf")
    assert isinstance(flow, jf.MAF)
    peer, z = NflowsMAF(flow), flow.noise(n, seed=0)
    auto = flow.plan("auto", n=n)
    exact = flow.decode(z, "sequential").x
    runs = {
        "nflows": lambda: peer.inverse(z),
        "sequential": lambda: flow.decode(z, "sequential").x,
        "selective, tol 1e-4": lambda: flow.decode(z, "selective").x,
        "auto": lambda: flow.decode(z, auto).x,
    }
    sweep = one_sweep(flow, z)
    floors = {"sequential": floor(flow, n), "selective, tol 1e-4": sweep, "auto": sweep}
    return race("nflows", runs, exact, repeats, floors, samples=n)


def zuko_rows(repeats: int, kind: str) -> list[Row]:
    """Five transforms of 128 features, 1000 samples, fitted for a moment: features depend on each other."""
    import zuko

    from benchmarks.accelerate import data, fit

    torch.manual_seed(0)
    make = {"MAF": zuko.flows.MAF, "NSF": zuko.flows.NSF}[kind]
    flow = make(128, transforms=5, hidden_features=(128, 128))
    fit(flow, lambda x: flow().log_prob(x), data(2000, 128), 40)
    z = torch.randn(1000, 128, generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def inverse(of: Any = flow) -> Tensor:
        return of().transform.inv(z)

    fast = jf.accelerate(copy.deepcopy(flow), tol=1e-6)
    masked = [m for m in flow.modules() if hasattr(m, "mask")]
    arithmetic = 2 * sum(int(m.mask.sum()) for m in masked)
    with torch.no_grad():
        x = inverse()
        forward = median(lambda: flow().transform(x))
    runs = {"zuko": inverse, "jf.accelerate, tol 1e-6": lambda: inverse(fast)}
    limit = len(z) * arithmetic / matmul_speed()
    print(f"    zuko's forward pass takes {forward:.4f} s")
    return race("zuko", runs, inverse(), repeats, {"jf.accelerate, tol 1e-6": limit, "zuko": limit}, flow=kind)
