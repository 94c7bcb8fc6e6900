"""The peers of the benchmarks compute what our models do; else their times would say nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from subjects import RotaryFlow, maf, tarflow

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.peers import NflowsMAF

from jacobiflow.flows.compare import plain_tarflow


@pytest.mark.parametrize("shift", [False, True])
def test_the_plain_loop_is_sequential_decoding(shift: bool) -> None:
    flow = tarflow(0.2, num_classes=3, volume_preserving=shift).double()
    z, labels = flow.noise(3, seed=0), torch.tensor([0, 2, -1])
    exact = flow.decode(z, "sequential", labels=labels).x
    assert (plain_tarflow(flow, z, labels) - exact).abs().max() < 1e-10


def test_the_plain_loop_refuses_another_network() -> None:
    flow = tarflow(0.2, family=RotaryFlow)
    with pytest.raises(ValueError, match="compare with 'sequential'"):
        plain_tarflow(flow, flow.noise(1, seed=0))


def test_nflows_on_our_weights() -> None:
    flow = maf(1.0, hidden=(24, 24), activation="tanh", min_scale=0.05).double()
    z = flow.noise(3, seed=0)
    peer = NflowsMAF(flow).double()
    assert (peer.inverse(z) - flow.decode(z, "sequential").x).abs().max() < 1e-10
