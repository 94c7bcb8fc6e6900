"""What a sweep makes final, in C and by the rule itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core import rows as reference
from jacobiflow.core import stopping
from jacobiflow.core.block import NoCache, take
from jacobiflow.core.rows import Rows
from jacobiflow.kernels import build, c_engine

N, LENGTH = 40, 23


@pytest.fixture(autouse=True)
def there() -> None:
    assert build.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


def random_rows(draw: torch.Generator, dim: int, width: int, *, cached: bool = True) -> Rows:
    z = torch.randn(N, LENGTH, dim, generator=draw)
    block: Any = None  # what was swept does not depend on it
    rows = Rows.start(block, z, reference.first_guess(z, "noise"), width)
    rows.cache = NoCache() if cached else None
    rows.frontier = torch.randint(1, LENGTH + 1, (N,), generator=draw)
    rows.status[:3] = jf.Status.SWEEP_LIMIT.rank  # rows that have ended
    rows.sweeps += 2
    return rows


def swept(draw: torch.Generator, seen: Tensor, *, spoiled: bool) -> Tensor:
    """New values: some as they were, some close, some far, some not finite."""
    kind = torch.randint(0, 4, seen.shape[:2], generator=draw)[..., None]
    noise = torch.randn(seen.shape, generator=draw)
    sizes = torch.tensor([0.0, 1e-7, 1e-3, 1.0])[kind]
    new = seen + sizes * noise
    if spoiled:
        bad = torch.rand(seen.shape[:2], generator=draw) < 0.1
        new[bad] = torch.tensor([float("inf"), float("nan"), -float("inf")])[: seen.shape[2]].mean()
    return new


@pytest.mark.parametrize("unit", ["absolute", "relative"])
@pytest.mark.parametrize("width", [2, 5, 22, None])
@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("dim", [1, 3])
@pytest.mark.parametrize("cached", [True, False])
def test_c_accepts_what_the_rule_accepts(unit: Any, width: int | None, spoiled: bool, dim: int, cached: bool) -> None:
    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        method = jf.Method(width=width, tol=5e-3, unit=unit)
        ours = random_rows(draw, dim, width or LENGTH, cached=cached)
        theirs = copy.deepcopy(ours)
        window = ours.window(ours.look())
        seen = take(ours.x, *window)
        new, slope = swept(draw, seen, spoiled=spoiled), torch.randn(seen.shape, generator=draw)
        got = c_engine.accept(ours, window, new, slope, method)
        want = reference.accept(theirs, window, new, slope, method)
        assert got.look == want.look
        assert torch.equal(got.overflows_here, want.overflows_here)
        assert torch.equal(got.overflows_beyond, want.overflows_beyond)
        # Where |x| alone shows that a relative change is small, C does not look for the larger unit.
        assert (got.largest >= want.largest * (1 - 1e-6)).all()
        large = want.largest > method.tol
        torch.testing.assert_close(got.largest[large], want.largest[large], rtol=1e-6, atol=0)
        for name in ("frontier", "sweeps", "evaluated", "status"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
        assert (ours.change >= theirs.change * (1 - 1e-6)).all()
        assert (ours.change <= method.tol).all()
        for name in ("seen", "answer", "log_slope"):
            mine, its = (getattr(rows, name)[:, :LENGTH] for rows in (ours, theirs))
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-6)


def test_another_rule_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that backends do not know is judged by `judge`, whatever the backend."""
    monkeypatch.setattr(c_engine, "backends_know", lambda method: False)
    draw = torch.Generator().manual_seed(0)
    rows = random_rows(draw, 1, LENGTH)
    calls = []
    judge = stopping.judge
    monkeypatch.setattr(reference, "judge", lambda *a: calls.append(1) or judge(*a))
    window = rows.window(rows.look())
    seen = take(rows.x, *window)
    c_engine.accept(rows, window, seen + 1, seen, jf.Method(tol=0.1))
    assert calls == [1]
