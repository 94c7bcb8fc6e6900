"""Blocks made of other libraries' transforms obey the laws that the decoder relies on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters.foreign_flows import CASES, CONTEXT, D, context_rows
from jacobiflow.adapters import accelerate
from jacobiflow.adapters.inverter import ForeignConditioner, IndexedConditioner, TransformInverter
from jacobiflow.adapters.masked import elementwise
from jacobiflow.core.block import Block, take
from jacobiflow.core.decode import decode
from jacobiflow.core.method import Method
from jacobiflow.flows.masked_mlp import MaskedConditioner

N, WIDTH = 6, 4
STARTS = torch.tensor([1, 5, 2, D - 1, 3, 8])
KINDS = {  # one case per kind of conditioner, with a natural and with another order
    "nflows-affine": MaskedConditioner,
    "nflows-affine-random": MaskedConditioner,
    "nflows-affine-own-activation": ForeignConditioner,
    "normflows-rq": ForeignConditioner,
    "normflows-rq-circular": ForeignConditioner,
    "zuko-naf": MaskedConditioner,
}
INDEXED = ("normflows-rq-circular", "zuko-naf")  # their maps differ between features


def bound(name: str, context: Tensor | None) -> Block:
    """The block of the first transform in a model."""
    model: Any = CASES[name].model(CONTEXT, torch.float64)
    _, patch = next(accelerate.known(list(accelerate.searched(model))))
    return TransformInverter(patch.spec()).pack(patch.state(), patch.spec()).bind(context)


def sequence(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(N, D, 1, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("rows", [1, N], ids=["shared context", "context per row"])
@pytest.mark.parametrize("name", KINDS)
@torch.no_grad()
def test_a_window_per_row_is_part_of_all_positions(name: str, rows: int) -> None:
    """Parameters and elementwise maps, also of maps that differ between features."""
    block, x, z = bound(name, context_rows(rows, torch.float64)), sequence(0), sequence(1)
    conditioner = block.conditioner
    assert isinstance(conditioner, IndexedConditioner) == (name in INDEXED)
    assert type(getattr(conditioner, "inner", conditioner)) is KINDS[name]
    full = conditioner.all_params(x)
    cache = conditioner.new_cache(N)
    theta = conditioner.params(x, 1, D - 1, cache)  # fills the cache
    torch.testing.assert_close(theta, full[:, 1:])
    torch.testing.assert_close(conditioner.first(N), full[:, :1])
    theta = conditioner.params(x, STARTS, WIDTH, cache)
    own = STARTS[:, None] + torch.arange(WIDTH) < D
    torch.testing.assert_close(theta[own], take(full, STARTS, WIDTH)[own])
    found = block.bijector.inverse(take(z, STARTS, WIDTH), theta)
    for a, b in zip(found, block.bijector.inverse(z, full), strict=True):
        torch.testing.assert_close(a[own], take(b, STARTS, WIDTH)[own], atol=2e-6, rtol=1e-6)
    few = torch.tensor([4, 1])
    theta = conditioner.select(few).params(x[few], STARTS[few], WIDTH, cache.select(few))
    torch.testing.assert_close(theta, take(full, STARTS, WIDTH)[few])


@pytest.mark.parametrize("name", KINDS)
def test_sliding_windows_give_the_sequential_answer(name: str) -> None:
    block, z = bound(name, context_rows(N, torch.float64)), sequence(1)
    found = [decode(block, z, Method(width=width, tol=1e-9, init="zeros", unit="relative")) for width in (1, 3, None)]
    if getattr(block.bijector, "features", 0):  # rows have windows of their own
        assert len(found[1].stats.blocks[0].evaluated.unique()) > 1
    for out in found[1:]:
        torch.testing.assert_close(out.x, found[0].x, atol=1e-5, rtol=1e-6)


def test_an_activation_in_place_keeps_its_options() -> None:
    own = elementwise(nn.LeakyReLU(0.3, inplace=True))
    x = torch.tensor([-1.0, 2.0])
    assert own is not None
    assert own(x).tolist() == pytest.approx([-0.3, 2.0])
    assert x.tolist() == [-1.0, 2.0]
