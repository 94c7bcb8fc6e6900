"""Whatever changes a weight, the next sample is of the changed weights."""

from __future__ import annotations

import copy
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import jacobiflow as jf
from hidden_writes import WAYS, Write
from subjects import lattice, maf, tarflow

FLOWS: dict[str, tuple[Callable[[], jf.Flow], str]] = {  # and a weight that counts
    "tarflow": (lambda: tarflow(0.3, num_classes=3), "blocks.1.net.layers.0.up.weight"),
    "tarflow-double": (lambda: tarflow(0.3).double(), "blocks.1.net.layers.0.up.weight"),
    "maf": (lambda: maf(0.8), "blocks.1.head.weight"),
    "maf-double": (lambda: maf(0.8).double(), "blocks.1.head.weight"),
    "nsf": (lambda: maf(0.8, transform="spline"), "blocks.1.linears.1.weight"),
    "lattice": (
        lambda: lattice(0.8, features=25, reach=2, hidden=(24, 16), activation="tanh"),
        "blocks.1.linears.1.weight",
    ),
}


def made(name: str) -> tuple[jf.Flow, nn.Parameter]:
    make, weight = FLOWS[name]
    flow = make().eval()
    return flow, flow.get_parameter(weight)


def decoded(flow: jf.Flow, **options: Any) -> Tensor:
    return flow.decode(flow.noise(3, seed=0), "sequential", **options).x


def fresh(flow: jf.Flow) -> Tensor:
    """What a flow gives that has never seen other weights."""
    return decoded(copy.deepcopy(flow))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FLOWS)
def test_changed_weights_count(name: str, way: str, when: str, tmp_path: Path) -> None:
    flow, weight = made(name)
    write: Write = WAYS[way](weight, tmp_path)
    before = decoded(flow)
    decoded(flow)
    write(weight.numel() - 2, 2.0)
    after = decoded(flow)
    assert torch.equal(after, fresh(flow))
    assert (after - before).abs().max() > 1e-4
    write(weight.numel() - 2, float("nan"))
    with pytest.raises(jf.NonfiniteError, match=r"block 1 .* has non-finite values"):
        decoded(flow)


def by_itself(flow: jf.Flow) -> Tensor:
    """A block that is solved without its flow."""
    block = flow.bound_blocks(3)[1]
    return jf.decode(block, flow.to_prior(flow.noise(3, seed=0)), jf.Method(width=1)).x


@torch.no_grad()
def encoded(flow: jf.Flow) -> Tensor:
    return flow.encode(torch.linspace(-1, 1, 2 * math.prod(flow.data_shape)).view(2, *flow.data_shape)).z


ROADS: dict[str, Callable[[jf.Flow], Tensor]] = {
    "a callback": lambda flow: decoded(flow, watch=lambda sweep: None),
    "no cache": lambda flow: decoded(flow, cache=False),
    "gradients": lambda flow: decoded(flow, differentiable=True).detach(),
    "a check": lambda flow: flow.decode(flow.noise(3, seed=0), "uniform", check=True).stats.residual,
    "encoding": encoded,
    "a block": by_itself,
}


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", ["tarflow", "maf"])
def test_changed_weights_count_everywhere(name: str, road: str, when: str) -> None:
    flow, weight = made(name)
    run = ROADS[road]
    decoded(flow)
    before = run(flow)
    weight.detach().numpy()[-1, -2] += 1
    after = run(flow)
    assert torch.equal(after, run(copy.deepcopy(flow)))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("name", ["tarflow", "maf"])
def test_blocks_and_flows_do_not_mislead_each_other(name: str, when: str) -> None:
    """A block packs other weights by itself; then the weights are again those that the flow has seen."""
    flow, weight = made(name)
    before, numbers = decoded(flow), weight.detach().numpy()
    old = numbers.copy()
    numbers *= 1.5
    by_itself(flow)
    numbers[:] = old
    assert torch.equal(decoded(flow), before)


def test_buffers_count(when: str) -> None:
    """The prior variance, the linear map next to the data, masks."""
    flow = tarflow(0.3)
    decoded(flow)
    flow.var.numpy()[1, 1] = 4.0
    assert torch.equal(decoded(flow), fresh(flow))
    flow.var.numpy()[1, 1] = -1.0
    with pytest.raises(jf.NonfiniteError, match="prior variance"):
        decoded(flow)
    flow = lattice(0.8, linear=True)
    before = decoded(flow)
    flow.blocks[1].head_mask.numpy()[-1] = False
    assert torch.equal(decoded(flow), fresh(flow))
    assert not torch.equal(decoded(flow), before)
    flow.linear.numpy()[:] = 0
    with pytest.raises(jf.NonfiniteError, match="singular"):
        decoded(flow)


def test_failures_of_weights_that_are_gone_are_none(when: str) -> None:
    flow, _ = made("maf")
    z, plan = flow.noise(3, seed=0), jf.Plan((jf.Method(max_sweeps=2, tol=0.0),) * 3)
    flow.decode(z)
    with pytest.raises(jf.DecodingError):
        flow.decode(z, plan, on_failure="raise")
    for block in flow.blocks:
        block.head.weight.detach().numpy()[:] = 0  # one sweep solves it now, the next one sees that
    assert torch.equal(flow.decode(z, plan, on_failure="raise").x, fresh(flow))


def test_unchanged_weights_are_made_and_solved_once(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flow, weight = made("maf")
    packed: list[int] = []
    pack = type(flow.blocks[0])._pack
    monkeypatch.setattr(type(flow.blocks[0]), "_pack", lambda self: packed.append(1) or pack(self))
    solved: list[int] = []
    solve = jf.Flow._decode
    monkeypatch.setattr(jf.Flow, "_decode", lambda self, *a: solved.append(1) or solve(self, *a))
    for _ in range(3):
        decoded(flow)
    assert (len(packed), len(solved)) == (3, 3)
    with torch.no_grad():
        weight.mul_(1)  # the version moves, the numbers do not
    decoded(flow)
    assert (len(packed), len(solved)) == (3, 4)
    weight.detach().numpy()[0, 0] += 1
    decoded(flow)
    assert (len(packed), len(solved)) == (4, 6 if when == "beside" else 5)


def test_threads_get_the_new_weights(when: str) -> None:
    flow, weight = made("maf")
    for turn in range(3):
        decoded(flow)
        weight.detach().numpy()[:, turn] += 0.3
        found: list[Tensor] = []
        threads = [threading.Thread(target=lambda: found.append(decoded(flow))) for _ in range(4)]  # noqa: B023
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        want = fresh(flow)
        assert len(found) == 4
        assert all(torch.equal(x, want) for x in found)


def test_forked_processes_look_for_themselves(when: str) -> None:
    flow, weight = made("maf")
    before = decoded(flow)
    child = os.fork()
    if not child:
        weight.detach().numpy()[-1, -2] += 1
        right = torch.equal(decoded(flow), fresh(flow)) and not torch.equal(decoded(flow), before)
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(decoded(flow), before)


def test_weights_written_to_while_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made of them belongs neither to the old numbers nor surely to the new ones."""
    flow, weight = made("maf")
    before = decoded(flow)
    old = weight.detach().numpy().copy()
    kind = type(flow.blocks[1])
    pack = kind._pack

    def late(self: Any) -> Any:
        weight.detach().numpy()[:] = 2 * old
        return pack(self)

    weight.detach().numpy()[0, 0] += 1
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_pack", late)
        decoded(flow)
    np.copyto(weight.detach().numpy(), old)
    weight.detach().numpy()[0, 0] += 1
    assert torch.equal(decoded(flow), fresh(flow))
    np.copyto(weight.detach().numpy(), old)
    assert torch.equal(decoded(flow), before)
