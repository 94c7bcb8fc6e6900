"""How often the loop waits for the device: every read of a value on the host ends a queue of launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import jacobiflow as jf
from jacobiflow.core.decode import decode
from subjects import subject


class Reads(TorchDispatchMode):
    """Counts operations whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        self.count += name in ("_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["tarflow", "tarflow-guided", "maf-affine"])
@pytest.mark.parametrize("width", [None, 5])
def test_one_read_per_sweep(name: str, width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond those that do not depend on the number of sweeps. One sample: nothing leaves the batch."""
    lists = 0
    original = torch.Tensor.tolist

    def tolist(self: torch.Tensor) -> Any:
        nonlocal lists
        lists += 1
        return original(self)

    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    one = subject(name)
    block, z = one.block(1, 1, "torch"), one.flow.noise(1, seed=1).reshape(1, one.length, -1)
    found = []
    for tol in (1.0, 0.0):
        lists = 0
        with Reads() as reads:
            out = decode(block, z, jf.Method(width=width, tol=tol))
        found.append((out.stats.blocks[0].sweeps.item(), reads.count + lists))
    (few, reads_few), (many, reads_many) = found
    assert many > few
    assert reads_many - reads_few == many - few
