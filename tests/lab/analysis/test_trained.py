"""What the paper says of trained flows, on the bundled one."""

from __future__ import annotations

import pytest
import torch

import jacobiflow as jf
from jacobiflow_lab.analysis.convergence import convergence
from jacobiflow_lab.analysis.redundancy import redundancy
from jacobiflow_lab.analysis.sweeps import sweeps

LABELS = torch.tensor([0, 3, 5, 8])


@pytest.fixture(scope="module")
def mnist() -> jf.Flow:
    return jf.load("mnist-small").requires_grad_(False)


@pytest.mark.parametrize("variant", ["attention", "strict"])
def test_the_first_layer_needs_its_predecessors_most(mnist: jf.Flow, variant: str) -> None:
    found = redundancy(mnist, mnist.noise(4, seed=0), variants=[variant], offsets=[1, 5], labels=LABELS)
    for m in found.masked:
        first, *rest = m.layers
        assert all(first.l2 > 1.3 * d.l2 and first.cosine < d.cosine for d in rest)


def test_later_layers_converge_faster(mnist: jf.Flow) -> None:
    first, *rest = convergence(mnist, mnist.noise(4, seed=0), labels=LABELS).blocks
    assert all(b.jacobi[3] / b.jacobi[0] < 0.1 * first.jacobi[3] / first.jacobi[0] for b in rest)
    assert all(len(b.jacobi) < len(first.jacobi) <= first.length for b in rest)


def test_the_first_layer_takes_many_more_sweeps(mnist: jf.Flow) -> None:
    first, *rest = sweeps(mnist, mnist.noise(4, seed=0), "uniform", labels=LABELS).layers
    assert first.mean >= 10
    assert all(s.mean <= 8 for s in rest)
