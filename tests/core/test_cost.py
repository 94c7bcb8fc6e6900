"""What decoding costs, in multiplications."""

from __future__ import annotations

import pytest
import torch

import jacobiflow as jf
from flops import flops
from subjects import Subject, maf, tarflow

CASES = {
    "tarflow": lambda: Subject(tarflow(0.2, image_size=14, patch_size=2, width=64, blocks=2)),
    "maf": lambda: Subject(maf(1.0, features=120, hidden=(96, 96), blocks=2)),
    "maf-residual": lambda: Subject(maf(0.5, features=120, hidden=(96, 96), residual=True, blocks=2)),
    "nsf": lambda: Subject(maf(0.5, features=60, hidden=(96,), transform="spline", context=2, blocks=2)),
}


@pytest.fixture(params=CASES)
def one(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr("jacobiflow.kernels.backend.FASTEST", ("torch",))  # its operations are counted
    made = CASES[request.param]()
    made.flow.requires_grad_(False)
    return made


@pytest.mark.parametrize("n", [1, 4])
def test_width_one_costs_about_a_forward_pass(one: Subject, n: int) -> None:
    z = one.flow.noise(n, seed=0)
    x = one.decode(z, "sequential").x
    forward = flops(lambda: one.flow.requires_grad_(True).encode(x, **one.condition(n)))
    one.flow.requires_grad_(False)
    assert forward > 0
    assert flops(lambda: one.decode(z, "sequential")) <= 1.3 * forward


def test_without_a_cache_it_would_cost_many(one: Subject) -> None:
    """The counter sees what it should: the law above is not empty."""
    z = one.flow.noise(2, seed=0)
    cached = flops(lambda: one.decode(z, "sequential"))
    assert flops(lambda: one.decode(z, "sequential", cache=False)) > 2 * cached


def test_converged_samples_are_not_paid_for_again(one: Subject) -> None:
    """Half the rows are solved by their first guess; they take part in one sweep and no more."""
    n = 8
    hard = one.flow.noise(n, seed=1)
    zero = torch.zeros(n, *one.flow.data_shape)
    plan = jf.Plan((jf.Method(width=1), jf.Method(tol=1e-5, init="zeros")))
    block = one.block(1, n)
    # z of the second block whose answer is all zeros: the first guess itself
    solved = block.forward(one.flow.to_sequence(zero))[0]
    moving = one.decode(hard, "sequential").x
    z = torch.cat((solved, block.forward(one.flow.to_sequence(moving))[0]))
    double = one.block(1, 2 * n)
    method = plan[1]
    mixed = jf.decode(double, z, method)
    assert (mixed.stats.blocks[0].sweeps[:n] == 1).all()
    assert (mixed.stats.blocks[0].sweeps[n:] >= 4).all()
    both = flops(lambda: jf.decode(double, z, method))
    alone = flops(lambda: jf.decode(double.select(torch.arange(n, 2 * n)), z[n:], method))
    sweep = flops(lambda: block.engine.params(z[:n], 1, one.length - 1, block.engine.new_cache(n)))
    assert both <= 1.02 * (alone + sweep)


def test_settled_positions_are_not_swept_again(one: Subject) -> None:
    """Full sweeps over T positions cost about half of T whole forward passes, and less if they settle."""
    z = one.flow.noise(2, seed=2).reshape(2, one.length, -1)
    block = one.block(0, 2)
    stats = jf.decode(block, z, jf.Method()).stats.blocks[0]
    bound = one.length * (one.length - 1) // 2
    assert (stats.evaluated <= bound).all()
    few = stats.sweeps.float() * (one.length - 1)
    assert (stats.evaluated < 0.95 * few).all()
