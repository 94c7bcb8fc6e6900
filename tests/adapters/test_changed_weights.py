"""Whatever changes a weight, an accelerated flow gives the library's own sample of the changed weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import jacobiflow as jf
from adapters.foreign_flows import CASES, D, perturb
from hidden_writes import WAYS

NAMES = ["nflows-affine-plain", "zuko-maf", "zuko-nsf", "normflows-affine", "pyro-affine"]


def masked(model: nn.Module) -> Any:
    """The masked layer before the last."""
    return [m for m in model.modules() if isinstance(m, nn.Linear) and hasattr(m, "mask")][-2]


@torch.no_grad()
def sample(name: str, model: nn.Module) -> Tensor:
    return CASES[name].run(model, CASES[name].noise(4, dtype=torch.float32), None)[0]


def place(name: str, model: nn.Module) -> int:
    """A weight that counts, and that looking at every few would miss."""
    model = copy.deepcopy(model)
    layer, before = masked(model), sample(name, model)
    numbers = layer.weight.detach().view(-1)
    for i in layer.mask.flatten().nonzero()[:, 0].tolist()[::-5]:
        numbers[i] += 2
        if i % (len(numbers) // 61) and (sample(name, model) - before).abs().max() > 1e-2:
            return i
        numbers[i] -= 2
    raise AssertionError("no weight of this layer counts")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_changed_weights_count(name: str, way: str, when: str, tmp_path: Path, sweeps: list[Any]) -> None:
    model = CASES[name].model(0, torch.float32)
    layer = masked(model)
    write, where = WAYS[way](layer.weight, tmp_path), place(name, model)
    jf.accelerate(model)
    before = sample(name, model)
    sample(name, model)
    value = layer.weight.detach().view(-1)[where].item()
    write(where, value + 2.0)
    assert sweeps
    after = sample(name, model)
    own = sample(name, jf.restore(copy.deepcopy(model)))
    assert (own - before).abs().max() > 1e-3
    assert (after - own).abs().max() < 1e-4
    write(where, value)
    assert torch.equal(sample(name, model), before)


def test_masks_count(when: str, sweeps: list[Any]) -> None:
    """They are buffers, and packed with the weights."""
    model = jf.accelerate(CASES["zuko-maf"].model(0, torch.float32))
    before, layer = sample("zuko-maf", model), masked(model)
    layer.mask.numpy()[:] = False
    after = sample("zuko-maf", model)
    own = sample("zuko-maf", jf.restore(copy.deepcopy(model)))
    assert (own - before).abs().max() > 1e-3
    assert (after - own).abs().max() < 1e-4


def test_layers_that_are_replaced_by_equal_ones_count(when: str, sweeps: list[Any]) -> None:
    """The new layer decides from then on, and the old one no longer does."""
    case = CASES["nflows-affine-plain"]
    model = jf.accelerate(case.model(3, torch.float32))
    z, context = case.noise(4, dtype=torch.float32), torch.randn(4, 3)
    with torch.no_grad():
        before = case.run(model, z, context)[0]
        old = model.autoregressive_net.context_layer
        model.autoregressive_net.context_layer = copy.deepcopy(old)
        assert torch.equal(case.run(model, z, context)[0], before)
        old.weight.detach().numpy()[:] += 1
        assert torch.equal(case.run(model, z, context)[0], before)


def test_nobody_is_warned_of_weights_that_are_gone(when: str, sweeps: list[Any]) -> None:
    from nflows.transforms.autoregressive import MaskedAffineAutoregressiveTransform

    torch.manual_seed(0)
    model = perturb(MaskedAffineAutoregressiveTransform(D, 24, use_residual_blocks=False))
    numbers, z = model.autoregressive_net.final_layer.bias.detach().numpy(), torch.randn(5, D)
    good = numbers.copy()
    jf.accelerate(model)
    numbers[0] = -1e38  # a scale of almost 0
    z[:, 0] = 1e38
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="5 of 5 samples"):
        model.inverse(z)
    numbers[:] = good
    z[:, 0] = 1.0
    with torch.no_grad():
        assert model.inverse(z)[0].isfinite().all()
