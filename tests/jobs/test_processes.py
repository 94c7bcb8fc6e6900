"""One flow in many threads, after a fork, in a spawned process, and with any number of threads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch

import jacobiflow as jf
from subjects import maf, tarflow

N = 24
MAKERS = {"tarflow": tarflow, "maf": maf}


def drawn(flow: jf.Flow, start: int = 0, count: int = N, **options: Any) -> torch.Tensor:
    plan = jf.Plan((jf.Method(width=3, tol=1e-4),) * len(flow.blocks))
    z = flow.noise(N, seed=3)[start : start + count]
    return flow.decode(z, plan, warn=False, **options).x


@pytest.fixture(params=MAKERS)
def flow(request: pytest.FixtureRequest) -> jf.Flow:
    return MAKERS[request.param](0.25).float()


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", ["c", "torch"])
def test_many_threads_share_a_flow(flow: jf.Flow, backend: str) -> None:
    """Each decodes a part of its own, again and again."""
    want = [drawn(flow, start, 3, backend=backend) for start in range(0, N, 3)]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            found = list(pool.map(lambda start: drawn(flow, start, 3, backend=backend), range(0, N, 3)))
            assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_the_number_of_threads_may_change_at_any_time(flow: jf.Flow, threads: None) -> None:
    torch.set_num_threads(1)
    want = drawn(flow, backend="c")
    for count in (2, 1, 16, 3):  # more than there are cores, too
        torch.set_num_threads(count)
        assert torch.equal(drawn(flow, backend="c"), want)
        assert torch.get_num_threads() == count


def test_a_spawned_process_takes_a_flow(flow: jf.Flow) -> None:
    z, plan = flow.noise(N, seed=3), flow.plan("sequential")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(flow.decode, z, plan).result(timeout=120)
    assert torch.equal(found.x, flow.decode(z, plan).x)


FORK = """
import os, sys, torch, jacobiflow as jf
threads, backend = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(threads)
flow = jf.load("mnist-small")
want = flow.sample(8, seed=0, plan="uniform", tol=10.0, backend=backend).x
pids = []
for _ in range(3):
    pid = os.fork()
    if not pid:
        torch.set_num_threads(1)
        found = flow.sample(8, seed=0, plan="uniform", tol=10.0, backend=backend).x
        os._exit(0 if torch.allclose(found, want, atol=1e-3) else 3)
    pids.append(pid)
again = flow.sample(8, seed=0, plan="uniform", tol=10.0, backend=backend).x  # the parent goes on
ends = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(ends, torch.equal(again, want))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "backend"), [(2, "c"), (1, "torch")])
def test_a_fork_after_use(threads: int, backend: str) -> None:
    """A child decodes what its parent does, whose threads it does not have."""
    ran = subprocess.run(
        [sys.executable, "-c", FORK, str(threads), backend],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ran.stdout == "[0, 0, 0] True\n", ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["1", "16"])
def test_omp_num_threads(setting: str) -> None:
    code = (
        "import torch, jacobiflow as jf; flow = jf.load('mnist-small'); "
        "print(float(flow.sample(4, seed=0, plan='sequential', backend='c').x.double().sum()))"
    )
    sums = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
            env=os.environ | {"OMP_NUM_THREADS": number},
        ).stdout
        for number in (setting, "2")
    }
    assert len(sums) == 1
