"""The same seeds give the same samples: bit for bit on repeated runs, within 1e-4 on other threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import jacobiflow as jf
from leftovers import PATIENCE, command, files, samples

TOLERANCE = 1e-4
WINDOWS = jf.Method(width=8, tol=1e-3)
WAYS: dict[str, dict[str, Any]] = {
    "sequential": {"plan": "sequential"},
    "uniform": {"plan": "uniform", "tol": 1e-5},
    "selective": {},
    "windows": {},
    "guided": {"labels": 3, "guidance": 1.5},
    "denoised": {"labels": 3, "denoise": True},
}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["mnist-small", "mnist-maf"])
def bundled(request: pytest.FixtureRequest) -> jf.Flow:
    return jf.load(request.param)


@pytest.mark.parametrize("way", WAYS)
def test_repeated_draws(bundled: jf.Flow, way: str) -> None:
    options = dict(WAYS[way])
    if not bundled.num_classes and "labels" in options:
        pytest.skip("it takes no labels")
    if way == "windows":
        options["plan"] = jf.Plan((WINDOWS,) * len(bundled.blocks))
    drawn = bundled.sample(4, seed=7, **options)
    first, again = drawn.x, bundled.sample(4, seed=7, **options).x
    assert torch.equal(first, again)
    same = {"plan": drawn.stats.plan} | {k: v for k, v in options.items() if k not in ("plan", "tol")}
    with threads(2):  # for which "auto" may choose another plan
        assert torch.get_num_threads() == 2
        other = bundled.sample(4, seed=7, **same).x
    assert (other - first).abs().max() <= TOLERANCE
    assert (bundled.sample(4, seed=8, **options).x - first).abs().max() > 0.1


@pytest.mark.slow
def test_repeated_runs_of_the_command(tmp_path: Path) -> None:
    """Two processes, one after the other, with a thread each; and one with two threads."""
    flags = ("--format", "npz", "-n", 6, "--labels", "0-9", "--batch", 3, "--seed", 7)
    flow, plan = jf.load("mnist-small"), tmp_path / "plan.json"
    flow.plan("auto", n=3).save(plan)  # two threads may choose another one
    for name, more in (("a", ()), ("b", ()), ("two", ("--threads", 2, "--plan", plan))):
        with command("sample", "mnist-small", *flags, *more, "--out", tmp_path / name) as process:
            _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, err
    assert files(tmp_path / "a") == files(tmp_path / "b")
    first, two = samples(tmp_path / "a")["x"], samples(tmp_path / "two")["x"]
    assert np.abs(first - two).max() <= TOLERANCE
    # The library draws them too.
    same = [flow.decode(flow.noise(3, 7, start=i), labels=torch.arange(i, i + 3)).x for i in (0, 3)]
    assert np.array_equal(first, torch.cat(same).numpy())
