"""Who watches sees every sweep of the loop, and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import jacobiflow as jf
from jacobiflow.core.rows import first_guess
from subjects import subject

SUBJECTS = ["tarflow-labels", "maf-exp", "nsf-context"]


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("method", [jf.Method(width=1), jf.Method(width=5, tol=0.02), jf.Method(tol=0.02)])
def test_every_sweep_is_seen_and_nothing_changes(name: str, method: jf.Method) -> None:
    one, seen = subject(name), []
    z = one.flow.noise(6, seed=2).reshape(6, one.length, -1)
    block = one.block(0, 6)
    plain = jf.decode(block, z, method)
    out = jf.decode(block, z, method, number=3, watch=seen.append)
    assert torch.equal(out.x, plain.x)
    assert torch.equal(out.stats.blocks[0].sweeps, plain.stats.blocks[0].sweeps)
    assert [s.number for s in seen] == list(range(len(seen)))
    assert {s.block for s in seen} == {3}
    taken = sum(s.moving.long() for s in seen[1:])
    assert torch.equal(taken, out.stats.blocks[0].sweeps)  # each sample was in as many as its stats say
    init = method.resolved(calibrated=block.guess is not None).init
    guess = first_guess(block.to_positions(z), init, block.guess)
    assert torch.equal(block.to_positions(seen[0].x)[:, 1:], guess[:, 1:])
    assert torch.equal(seen[-1].x, out.x)
    for before, after in pairwise(seen):
        still = torch.ones(6, one.length, dtype=torch.bool)
        still[:, after.lo : after.hi] = ~after.moving[:, None]
        assert torch.equal(block.to_positions(after.x)[still], block.to_positions(before.x)[still])
        assert not torch.equal(after.x, before.x)


def test_the_first_positions_are_exact_after_as_many_sweeps() -> None:
    one, seen = subject("tarflow"), []
    z = one.flow.noise(3, seed=0)
    block = one.block(0, 3)
    exact = jf.decode(block, z, jf.Method(width=1)).x
    jf.decode(block, z, jf.Method(init="noise"), watch=seen.append)
    assert len(seen) <= one.length  # the first guess and at most T - 1 sweeps
    for sweep in seen:
        known = sweep.number + 1  # the first position is given
        assert (sweep.x[:, :known] - exact[:, :known]).abs().max() < 1e-10
    assert (seen[1].x - exact).abs().max() > 1e-3


def test_a_flow_shows_guesses_in_the_order_of_the_data() -> None:
    one, seen = subject("tarflow-labels"), []
    z = one.flow.noise(2, seed=0)
    out = one.decode(z, "uniform", tol=0.1, watch=seen.append)
    assert sorted({s.block for s in seen}) == [0, 1, 2]
    assert torch.equal(one.flow.from_sequence(seen[-1].x), out.x)
    for i in (1, 2):  # a block starts from what the one before left, but for the first in its own order
        start = next(s for s in seen if s.block == i)
        end = [s for s in seen if s.block == i - 1][-1]
        assert torch.equal(start.x, end.x)  # position 0 is the identity in these flows
    seen[-1].x.requires_grad_()  # an ordinary tensor


def test_samples_in_parts_are_watched_at_once() -> None:
    one = subject("tarflow", torch.float32)
    block = one.block(0, 5, "torch")
    in_parts = replace(block, engine=replace(block.engine, rows=2))  # type: ignore[type-var]
    seen: list[jf.Sweep] = []
    z = one.flow.noise(5, seed=0)
    assert in_parts.engine.rows == 2
    out = jf.decode(in_parts, z, jf.Method(tol=0.1), watch=seen.append)
    assert all(s.x.shape == z.shape for s in seen)
    assert torch.equal(seen[-1].x, out.x)


def test_samples_that_are_solved_again_are_not_shown_twice() -> None:
    one, seen = subject("tarflow"), []
    z = one.flow.noise(3, seed=0)
    out = jf.decode(one.block(0, 3), z, jf.Method(max_sweeps=2), watch=seen.append)
    assert out.stats.status is jf.Status.FELL_BACK
    assert [s.number for s in seen] == [0, 1, 2]
