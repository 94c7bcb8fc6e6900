"""The window loop: stopping, counting, failing. Causal attention and masked MLPs both."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import jacobiflow as jf
from subjects import maf, subject, tarflow

NET_SUBJECTS = ["tarflow-labels", "maf-exp", "nsf-context"]


@pytest.mark.parametrize("name", NET_SUBJECTS)
@pytest.mark.parametrize("width", [2, 4, 8])
def test_windows_take_fewer_sweeps_than_positions(name: str, width: int) -> None:
    """A window slides by as many positions as became final, one at least."""
    one = subject(name)
    block, z = one.block(0, 6), one.flow.noise(6, seed=1).reshape(6, one.length, -1)
    exact = jf.decode(block, z, jf.Method(width=1)).x
    errors = []
    for tol in (1e-1, 1e-3, 1e-6):
        out = jf.decode(block, z, jf.Method(width=width, tol=tol))
        assert (out.stats.blocks[0].sweeps >= (one.length - 1) / width).all()
        assert (out.stats.blocks[0].sweeps <= one.length - 1).all()
        assert (out.stats.blocks[0].evaluated <= width * out.stats.blocks[0].sweeps).all()
        errors.append((out.x - exact).abs().max().item())
    assert errors[2] < 1e-3
    assert errors[2] <= errors[0]


@pytest.mark.filterwarnings("ignore:.*reported as CONVERGED:RuntimeWarning")  # float32 and large slopes
@given(data=st.data())
def test_random_blocks_agree_with_sequential(data: st.DataObject) -> None:
    """Any family, shape, width, tolerance, first guess and dtype."""
    draw = data.draw
    dtype = draw(st.sampled_from([torch.float64, torch.float32]), label="dtype")
    seed = draw(st.integers(0, 10_000), label="seed")
    if draw(st.booleans(), label="transformer"):
        patch, grid = draw(st.sampled_from([1, 2])), draw(st.integers(1, 4))
        flow = tarflow(
            draw(st.floats(0.05, 0.2)),
            seed,
            image_size=patch * grid,
            patch_size=patch,
            image_channels=draw(st.integers(1, 3)),
            blocks=2,
            layers_per_block=1,
            volume_preserving=draw(st.booleans()),
        )
    else:
        flow = maf(
            draw(st.floats(0.2, 1.0)),
            seed,
            features=draw(st.integers(1, 20)),
            hidden=tuple(draw(st.lists(st.integers(1, 30), min_size=1, max_size=3))),
            blocks=2,
            order=draw(st.sampled_from(["reversed", "random", "same"])),
            transform=draw(st.sampled_from(["affine", "spline"])),
            scale=draw(st.sampled_from(["softplus", "sigmoid", "exp"])),
        )
    flow.to(dtype)
    method = jf.Method(
        width=draw(st.none() | st.integers(1, 25), label="width"),
        tol=draw(st.sampled_from([0.0, 1e-6, 1e-2, 0.5]), label="tol"),
        init=draw(st.sampled_from(["zeros", "noise", "previous"]), label="init"),
    )
    z = flow.noise(draw(st.integers(0, 6), label="n"), seed=seed)
    exact = flow.decode(z, "sequential")
    out = flow.decode(z, jf.Plan((method,) * 2), check=True)
    good = torch.tensor([s is jf.Status.EXACT for s in exact.stats.blocks[-1].status], dtype=torch.bool)
    scale = exact.x[good].abs().max().clamp_min(1).item() if good.any() else 1.0
    close = (1e-10 if dtype == torch.float64 else 1e-4) * scale
    if method.tol == 0:
        assert ((out.x - exact.x)[good].abs() < close).all()
    for block in out.stats.blocks:
        assert (block.update <= method.tol).all() or block.worst is jf.Status.NONFINITE
        assert (block.sweeps[good] <= max(flow.latent_shape[0] - 1, 0)).all()
    # A residual is the error of the answer seen from the noise: tol bounds the last update, and one
    # more application of a map with slopes of a few turns it into at most a few times as much.
    assert (out.stats.residual[good] <= close + 1e3 * method.tol).all()


TINY = {
    "maf-1": lambda: maf(1.0, features=1),
    "maf-2": lambda: maf(1.0, features=2),
    "maf-3": lambda: maf(1.0, features=3, hidden=(2,)),
    "nsf-2": lambda: maf(1.0, features=2, transform="spline", context=0),
    "tarflow-1": lambda: tarflow(0.2, image_size=2, patch_size=2),
    "tarflow-4": lambda: tarflow(0.2, image_size=4, patch_size=2),
}


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("width", [1, 2, 3, 5, None])
def test_tiny_lengths(name: str, width: int | None) -> None:
    flow = TINY[name]().double()
    length = int(name[-1])
    assert flow.latent_shape[0] == length
    out = flow.decode(flow.noise(5, seed=3), jf.Plan((jf.Method(width=width),) * 3), check=True)
    assert out.stats.residual.max() < 1e-12
    assert out.stats.status is jf.Status.EXACT
    for stats in out.stats.blocks:
        assert stats.sweeps.max() <= length - 1
        assert stats.evaluated.max() <= length * (length - 1) // 2


def test_sequential_counts_one_sweep_less_than_positions() -> None:
    one = subject("tarflow")
    stats = one.decode(one.flow.noise(3, seed=0), "sequential").stats.blocks[0]
    assert stats.sweeps.tolist() == stats.evaluated.tolist() == [one.length - 1] * 3


def test_tol_stops_the_sequence_as_a_whole() -> None:
    """Early positions go on improving while later ones settle: the answer is a plain iterate."""
    one = subject("maf-exp")
    z = one.flow.noise(5, seed=2)[..., None]
    block = one.block(0, 5)
    out = jf.decode(block, z, jf.Method(tol=0.3))
    for i in range(5):
        few = int(out.stats.blocks[0].sweeps[i])
        same = jf.decode(block, z, jf.Method(tol=0.0, max_sweeps=few), on_failure="return")
        assert (out.x[i] - same.x[i]).abs().max() < 1e-12
        assert out.stats.blocks[0].update[i] <= 0.3


# Troubles: x_t = 1 + z_t exp(a_t), a_t = -20 if x_{t-1} is 1 and 800 if it is 0


@functools.cache
def planted(family: str) -> jf.Flow:
    """One block on which a wrong guess explodes, while a right one passes on from position to position."""
    if family == "maf":
        flow: jf.Flow = maf(0.0, features=12, blocks=1, hidden=(22,), scale="exp")
        net = flow.blocks[0]
        with torch.no_grad():
            for p in net.parameters():
                p.zero_()
            for d in range(1, 12):  # two units of each degree clamp the last position they see to [0, 1]
                for unit, bias in ((2 * d - 2, 0.0), (2 * d - 1, -1.0)):
                    assert net.degrees[1][unit] == d
                    net.linears[0].weight[unit, d - 1] = 1.0
                    net.linears[0].bias[unit] = bias
                net.head.weight[2 * d, 2 * d - 2] = -820.0
                net.head.weight[2 * d, 2 * d - 1] = 820.0
                net.head.bias[2 * d] = 800.0
                net.head.bias[2 * d + 1] = 1.0
    else:
        flow = tarflow(0.2, image_size=4, patch_size=1, blocks=1)
        block = flow.blocks[0]
        with torch.no_grad():  # attention stays, with little weight; the rest is a straight line
            for layer in block.net.layers:
                layer.proj.weight *= 1e-9
                layer.proj.bias.zero_()
                layer.down.weight.zero_()
                layer.down.bias.zero_()
            for p in (block.proj_in.weight, block.proj_in.bias, block.pos_embed, block.proj_out.weight):
                p.zero_()
            block.proj_in.weight[0] = 1.0
            block.proj_out.weight[0, 0] = -820.0
            block.proj_out.bias[:] = torch.tensor([800.0, 1.0])
    return flow.double().requires_grad_(False)


def planted_noise(flow: jf.Flow) -> tuple[Tensor, dict[str, list[int]]]:
    """Rows that sweeps solve, rows that only a narrow width solves, rows with no finite answer."""
    z = 1e-3 * flow.noise(15, seed=0)
    kinds = {"easy": [0, 3, 6, 9, 12], "hard": [1, 4, 7, 10, 13], "hopeless": [2, 5, 8, 11, 14]}
    z[kinds["easy"]] += 1.0
    z[kinds["hard"], 0] += 1.0
    return z, kinds


@pytest.mark.parametrize("family", ["maf", "tarflow"])
def test_overflowing_samples_fall_back_to_the_sequential_answer(family: str) -> None:
    flow = planted(family)
    z, kinds = planted_noise(flow)
    exact = flow.decode(z, "sequential", warn=False)
    finite = exact.x.flatten(1).isfinite().all(1)
    assert finite.tolist() == [i not in kinds["hopeless"] for i in range(15)]
    out = flow.decode(z, "uniform", tol=1e-6, init="previous", warn=False)
    stats = out.stats.blocks[0]
    assert stats.samples(jf.Status.FELL_BACK) == kinds["hard"]
    assert stats.samples(jf.Status.NONFINITE) == kinds["hopeless"]
    assert (out.x - exact.x)[finite].abs().max() < 1e-10
    assert (out.log_det - exact.log_det)[kinds["hard"]].abs().max() < 1e-10
    assert out.stats.status is jf.Status.NONFINITE
    assert stats.sweeps[kinds["hopeless"]].max() <= 3
    assert exact.stats.blocks[0].samples(jf.Status.NONFINITE) == kinds["hopeless"]
    assert exact.stats.blocks[0].sweeps[kinds["hopeless"]].max() <= 3
    assert out.x[kinds["hopeless"]].flatten(1).isnan().any(1).all()  # no guess is sold as an answer
    assert out.log_det[kinds["hopeless"]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("on_failure", ["fallback", "return"])
@pytest.mark.parametrize("width", [None, 3, 2])
def test_a_last_position_that_overflows_is_alone(width: int | None, on_failure: Any, dtype: torch.dtype) -> None:
    """All before it stand still at once, and nothing is left to sweep."""
    flow = jf.MAF(jf.MAFConfig(features=3, blocks=1, hidden=(4,), scale="exp")).to(dtype)
    with torch.no_grad():
        flow.blocks[0].head.bias[4] = 1000.0
    z = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=dtype)  # inf, and 0 * inf
    exact = flow.decode(z, "sequential", warn=False)
    plan = jf.Plan((jf.Method(width=width, tol=1e-6),))
    out = flow.decode(z, plan, on_failure=on_failure, warn=False)
    assert out.stats.status is exact.stats.status is jf.Status.NONFINITE
    assert torch.equal(out.x[:, :2], exact.x[:, :2]) or on_failure == "return"
    assert not out.x[:, 2].isfinite().any()


@pytest.mark.parametrize("family", ["maf", "tarflow"])
def test_bad_samples_cost_their_batch_mates_nothing(family: str) -> None:
    flow = planted(family)
    z, kinds = planted_noise(flow)
    mixed = flow.decode(z, "uniform", tol=1e-6, init="previous", warn=False)
    alone = flow.decode(z[kinds["easy"]], "uniform", tol=1e-6, init="previous")
    assert (mixed.x[kinds["easy"]] - alone.x).abs().max() < 1e-12
    assert mixed.stats.blocks[0].sweeps[kinds["easy"]].tolist() == alone.stats.blocks[0].sweeps.tolist()
    assert alone.stats.blocks[0].sweeps.max() <= 5


@pytest.mark.parametrize("family", ["maf", "tarflow"])
def test_raise_and_return_do_what_they_say(family: str) -> None:
    flow = planted(family)
    z, kinds = planted_noise(flow)
    with pytest.raises(jf.DecodingError, match="block 0, samples") as caught:
        flow.decode(z, "uniform", tol=1e-6, init="previous", on_failure="raise")
    assert set(caught.value.samples) == set(kinds["hopeless"])
    assert caught.value.status is jf.Status.NONFINITE
    assert caught.value.block == 0
    out = flow.decode(z, "uniform", tol=1e-6, init="previous", on_failure="return", warn=False)
    assert out.stats.blocks[0].samples(jf.Status.NONFINITE) == kinds["hopeless"]
    assert out.stats.blocks[0].samples(jf.Status.FELL_BACK) == kinds["hard"]
    exact = flow.decode(z[kinds["easy"]], "sequential", on_failure="raise")  # nothing to raise
    assert (out.x[kinds["easy"]] - exact.x).abs().max() < 1e-6
    with pytest.raises(ValueError, match="on_failure"):
        flow.decode(z, on_failure="ignore")


@pytest.mark.parametrize("name", ["tarflow-labels", "maf-exp"])
def test_max_sweeps(name: str) -> None:
    one = subject(name)
    z = one.flow.noise(4, seed=1)
    plan = jf.Plan((jf.Method(tol=1e-9, max_sweeps=2),) * 3)
    exact = one.decode(z, "sequential")
    out = one.decode(z, plan)
    assert out.stats.status is jf.Status.FELL_BACK
    assert (out.x - exact.x).abs().max() < 1e-8
    with pytest.raises(jf.DecodingError, match="max_sweeps") as caught:
        one.decode(z, plan, on_failure="raise")
    assert caught.value.status is jf.Status.SWEEP_LIMIT
    back = one.decode(z, plan, on_failure="return")
    assert all((b.sweeps == 2).all() for b in back.stats.blocks)
    assert (back.x - exact.x).abs().max() > 1e-6


@pytest.mark.parametrize("name", ["tarflow", "maf-exp"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_noise_that_is_not_finite_spoils_its_own_row_only(name: str, value: float) -> None:
    one = subject(name)
    z = one.flow.noise(4, seed=1)
    good = one.decode(z, "uniform", tol=1e-6)
    z.view(4, -1)[2, 5] = value
    for plan in (jf.Plan.uniform(3, tol=1e-6), jf.Plan.sequential(3)):
        out = one.decode(z, plan, warn=False)
        assert out.stats.blocks[0].samples(jf.Status.NONFINITE) == [2]
        assert out.stats.blocks[0].sweeps[2] == 0
        assert (out.x - good.x)[[0, 1, 3]].abs().max() < 1e-4
        assert out.x[2].isnan().any()


@pytest.mark.parametrize("make", [tarflow, maf])
@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize("plan", ["sequential", "uniform"])
def test_weights_that_are_not_finite_name_their_block(make: Any, k: int, value: float, plan: str) -> None:
    flow = make(0.2)
    z = flow.noise(2, seed=0)
    flow.decode(z, plan)  # what was seen to be finite must be looked at again
    name, p = list(flow.blocks[k].named_parameters())[1]
    p.data.view(-1)[0] = value
    with pytest.raises(jf.NonfiniteError, match=rf"block {2 - k} .*{re.escape(name)}"):
        flow.decode(z, plan)


def test_context_that_is_not_finite_raises() -> None:
    one = subject("maf-context")
    with pytest.raises(jf.NonfiniteError, match="context"):
        one.flow.sample(2, context=torch.tensor([[0.0, 1.0, 2.0], [0.0, float("nan"), 2.0]]))


def test_status_is_advice() -> None:
    assert [s.name for s in jf.Status] == ["EXACT", "CONVERGED", "FELL_BACK", "SWEEP_LIMIT", "NONFINITE"]
    assert "float64" in jf.Status.NONFINITE.value
    assert [s.rank for s in jf.Status] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("width", 0),
        ("width", 2.0),
        ("tol", -1.0),
        ("tol", math.nan),
        ("tol", "1"),
        ("max_sweeps", 0),
        ("init", "x"),
        ("unit", "x"),
        ("unit", True),
    ],
)
def test_a_method_refuses_nonsense(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"Method.{field}"):
        jf.Method(**{field: value})


def test_shapes_are_checked() -> None:
    one = subject("maf-exp")
    with pytest.raises(ValueError, match=r"z must be \[N, 19, D\]"):
        jf.decode(one.block(0, 2), torch.zeros(2, 19).double(), jf.Method(width=1))
    with pytest.raises(ValueError, match=r"z must be \[N, 19\], not \[2, 3\]"):
        one.flow.decode(torch.zeros(2, 3).double())
