"""The compiled masked network against torch's, in double precision."""

from __future__ import annotations

import copy
import itertools
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import jacobiflow as jf
from jacobiflow.adapters.foreign import SoftplusSpline
from jacobiflow.adapters.pyro import ClampedAffine, StableAffine
from jacobiflow.adapters.zuko import SoftclipAffine, SoftclipSpline
from jacobiflow.core import native
from jacobiflow.core.bijectors import ExpAffine, ScaleAffine, Shift, Spline
from jacobiflow.flows.masked import ACTIVATIONS, BoundMaskedBlock, UnitCache
from jacobiflow.flows.native_masked import NativeUnits, kind
from subjects import maf

SHAPES = {
    "plain": {"features": 37, "hidden": (50, 33)},
    "one layer": {"features": 20, "hidden": (70,)},
    "residual": {"features": 29, "hidden": (48, 48, 48), "residual": True},
    "context": {"features": 18, "hidden": (40, 24), "context": 3},
    "residual context": {"features": 18, "hidden": (40, 40), "context": 3, "residual": True},
    "spline": {"features": 21, "hidden": (32, 32), "transform": "spline"},
    "few units": {"features": 40, "hidden": (12, 7)},
    "single": {"features": 1, "hidden": (5,)},
}
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def there() -> None:
    assert native.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


def pair(n: int, **shape: object) -> tuple[BoundMaskedBlock, BoundMaskedBlock, Tensor]:
    """A block in single precision, torch's in double, and inputs."""
    flow = maf(0.7, blocks=1, **shape)
    exact = copy.deepcopy(flow).double()
    context = torch.randn(n, flow.context_features) if flow.context_features else None
    ours = flow.bound_blocks(n, context=context)[0][0]
    theirs = exact.bound_blocks(n, context=None if context is None else context.double())[0][0]
    return ours, theirs, torch.randn(n, flow.config.features, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 13])
def test_parameters_are_torchs(shape: str, threads: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacobiflow.flows.native_masked.threads", lambda: threads)
    ours, exact, x = pair(n, **SHAPES[shape])
    end = ours.length
    with torch.no_grad():
        want = exact.params(x.double(), 0, end).float()
        assert want.std() > 0.05
        torch.testing.assert_close(ours.params(x, 0, end), want, **CLOSE)
        cache = ours.new_cache(n)
        assert isinstance(cache, NativeUnits)
        edges = sorted({0, 1, 2, 3, end // 2, end // 2 + 1, end} & set(range(end + 1)))
        for lo, hi in itertools.pairwise(edges):
            torch.testing.assert_close(ours.params(x, lo, hi, cache), want[:, lo:hi], **CLOSE)
            assert cache.valid == hi - 1
        cache.valid = end // 3  # what lies beyond is stale
        torch.testing.assert_close(ours.params(x, end // 2, end, cache), want[:, end // 2 :], **CLOSE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    ours, exact, x = pair(9, features=24, hidden=(64, 64), activation=activation)
    with torch.no_grad():
        want = exact.params(3 * x.double(), 0, 24).float()
        torch.testing.assert_close(ours.params(3 * x, 0, 24), want, **CLOSE)


def test_batches_of_every_size() -> None:
    ours, _, x = pair(230, features=30, hidden=(64, 64))
    with torch.no_grad():
        whole = ours.params(x, 0, 30)
        for n in (0, 1, 5, 6, 12, 96, 97, 193):
            torch.testing.assert_close(ours.params(x[:n], 0, 30), whole[:n], **CLOSE)


@pytest.mark.parametrize("shape", ["plain", "residual context"])
def test_selected_rows_keep_what_is_cached(shape: str) -> None:
    ours, _, x = pair(6, **SHAPES[shape])
    end, rows = ours.length, torch.tensor([5, 0, 2])
    with torch.no_grad():
        cache = ours.new_cache(6)
        want = ours.params(x, 0, end, cache)
        cache.valid = 7
        fewer = cache.select(rows)
        assert fewer.valid == cache.valid == 7
        torch.testing.assert_close(ours.select(rows).params(x[rows], 8, end, fewer), want[rows, 8:], **CLOSE)


def test_one_context_for_all_rows() -> None:
    ours, _, x = pair(5, **SHAPES["context"])
    assert ours.net.context is not None
    assert ours.context is not None
    with torch.no_grad():
        first = ours.context[:1].expand(5, -1)
        want = BoundMaskedBlock(ours.net, ours.bijector, first).params(x, 0, ours.length)
        terms = {0: ours.net.context(ours.context[:1]).T.contiguous()}
        for packed in (ours.net.pack(), copy.copy(ours.net.pack())):
            cache = packed.new_cache(5, terms)
            torch.testing.assert_close(cache.params(x, 0, ours.length), want, **CLOSE)
            cache.valid = 4
            fewer = cache.select(torch.tensor([3, 1]))
            torch.testing.assert_close(fewer.params(x[[3, 1]], 5, ours.length), want[[3, 1], 5:], **CLOSE)


def test_settled_units_are_left_alone() -> None:
    """Even those that share a panel with units that are computed anew from inputs that overflow."""
    ours, _, x = pair(3, **SHAPES["plain"])
    with torch.no_grad():
        cache = ours.new_cache(3)
        want = ours.params(x, 0, 20, cache)
        cache.valid = 10
        spoiled = x.clone()
        spoiled[:, 10:] = float("inf")
        ours.params(spoiled, 11, 20, cache)
        cache.valid = 10
        torch.testing.assert_close(ours.params(x, 11, 20, cache), want[:, 11:], **CLOSE)


@pytest.mark.parametrize("plan", ["sequential", "selective"])
@pytest.mark.parametrize("shape", ["plain", "residual context", "spline"])
def test_whole_decodings_are_torchs(plan: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = maf(0.5, blocks=3, **SHAPES[shape])
    z = flow.noise(20, seed=0)
    options = {"context": torch.randn(20, flow.context_features)} if flow.context_features else {}
    ours = flow.decode(z, plan, check=True, **options)
    with monkeypatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        block = flow.bound_blocks(20, **options)[0][0]
        with torch.no_grad():
            assert isinstance(block.new_cache(20), UnitCache)
        theirs = flow.decode(z, plan, **options)
    torch.testing.assert_close(ours.x, theirs.x, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(ours.log_det, theirs.log_det, atol=1e-3, rtol=1e-3)
    for mine, its in zip(ours.stats.blocks, theirs.stats.blocks, strict=True):
        assert (mine.sweeps - its.sweeps).abs().max() <= 1


MAPS = {
    "exp": ExpAffine(),
    "softplus": ScaleAffine("softplus", 1e-3),
    "sigmoid": ScaleAffine("sigmoid", 1e-3),
    "softclip": SoftclipAffine(1e-3),
    "clamped": ClampedAffine(-0.2, 0.3),
    "stable": StableAffine(2.0),
    "spline": Spline(5, 2.0),
    "softplus spline": SoftplusSpline(5, 1.5, 1e-2, 1e-2),
    "softclip spline": SoftclipSpline(5, 1.5, 0.0, 1e-3),
}


def shape_for(name: str) -> dict[str, object]:
    return SHAPES["residual context"] | ({"transform": "spline", "bins": 5} if "spline" in name else {})


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("n", [1, 7, 100, 203])
def test_one_position_after_the_other_in_one_call(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and slopes are those of single steps in double precision, whatever the stretches."""
    monkeypatch.setattr("jacobiflow.flows.native_masked.threads", lambda: 3)
    ours, exact, z = pair(n, **shape_for(name))
    ours, exact = (replace(block, bijector=MAPS[name]) for block in (ours, exact))
    end = ours.length
    want, slopes = z.double(), torch.zeros(n, end, dtype=torch.float64)
    with torch.no_grad():
        for t in range(end):
            theta = exact.params(want, t, t + 1)
            want[:, t : t + 1], slope = exact.inverse(z[:, t : t + 1].double(), theta)
            slopes[:, t] = slope[:, 0, 0]
        assert n == 1 or (slopes.std(0) > 1e-3).sum() > end // 2
        for edges in ((0, end), (0, 1, 4, 5, 11, end)):
            x, cache, found = torch.full_like(z, 3.0), ours.new_cache(n), []
            for lo, hi in itertools.pairwise(edges):
                found.append(ours.single(x, z, lo, hi, cache))
                assert cache.valid <= hi - 1
                assert (x[:, hi:] == 3).all()
            torch.testing.assert_close(x, want.float(), **CLOSE)
            torch.testing.assert_close(torch.cat(found, 1), slopes.float(), **CLOSE)
        wide = torch.randn(n, end, 2)
        assert ours.single(x, wide[..., :1], 0, end, ours.new_cache(n)) is None  # not in one piece


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("activation", ["relu", "elu", "tanh"])
def test_an_answer_does_not_depend_on_the_batch(name: str, activation: str) -> None:
    """To the last bit, though few rows and many are solved in different ways."""
    ours, _, z = pair(150, **{**shape_for(name), "context": 0, "activation": activation})
    ours = replace(ours, bijector=MAPS[name])

    def solve(rows: Tensor) -> tuple[Tensor, Tensor | None]:
        some, x = ours.select(rows), torch.zeros(len(rows), ours.length, 1)
        with torch.no_grad():
            slope = some.single(x, z[rows], 0, ours.length, some.new_cache(len(rows)))
        return x, slope

    want, slopes = solve(torch.arange(150))
    assert slopes is not None
    for n in (1, 2, 3, 4, 5, 8, 17, 100):
        x, slope = solve(torch.arange(n))
        assert slope is not None
        assert torch.equal(x, want[:n])
        assert torch.equal(slope, slopes[:n])


def test_a_network_deeper_than_the_stack_of_a_thread() -> None:
    flow = maf(0.1, features=6, blocks=1, hidden=(4,) * 400)
    exact = copy.deepcopy(flow).double()
    z = flow.noise(3, seed=0)
    found: list[Tensor] = []
    size = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=lambda: found.append(flow.decode(z, "sequential").x))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(size)
    torch.testing.assert_close(found[0], exact.decode(z.double(), "sequential").x.float(), **CLOSE)


@pytest.mark.parametrize("bias", [-50.0, -1e3, -1e35, -3e38])
def test_silu_far_out(bias: float) -> None:
    flow = maf(0.7, features=6, blocks=1, hidden=(20,), activation="silu")
    with torch.no_grad():
        flow.blocks[0].linears[0].bias.fill_(bias)
    exact, z = copy.deepcopy(flow).double(), flow.noise(5, seed=0)
    want = exact.decode(z.double(), "sequential").x.float()
    torch.testing.assert_close(flow.decode(z, "sequential").x, want, **CLOSE)


@pytest.mark.parametrize("scale", ["softplus", "sigmoid"])
def test_scales_below_the_smallest_normal_number(scale: str) -> None:
    """Only torch tells them apart; min_scale=0 allows them."""
    flow = jf.MAF(jf.MAFConfig(features=6, blocks=1, hidden=(8,), min_scale=0.0, scale=scale))
    with torch.no_grad():
        flow.blocks[0].head.bias[::2] = -90.0 if scale == "softplus" else -88.0
    z = torch.full((3, 6), 1e-40)
    exact = copy.deepcopy(flow).double().decode(z.double(), "sequential")
    torch.testing.assert_close(flow.decode(z, "sequential").log_det, exact.log_det.float(), rtol=1e-4, atol=0)


def test_unknown_maps_are_not_solved_in_one_call() -> None:
    ours, _, z = pair(3, **SHAPES["plain"])
    with torch.no_grad():
        cache = ours.new_cache(3)
        assert ours.single(z.clone(), z, 0, 4, cache) is not None
        assert replace(ours, bijector=Shift()).single(z.clone(), z, 0, 4, cache) is None


def test_which_activations_are_known() -> None:
    assert [kind(f) for f in ACTIVATIONS.values()] == [
        kind(f) for f in (nn.ReLU(), nn.ELU(), nn.GELU(), nn.SiLU(), nn.Tanh())
    ]
    assert (
        kind(nn.ELU(alpha=0.5)) is kind(nn.GELU("tanh")) is kind(nn.Softplus()) is kind(torch.sigmoid) is None
    )


def test_changed_weights_count() -> None:
    flow = maf(0.5, features=12, hidden=(16, 16))
    z = flow.noise(2, seed=0)
    before = flow.decode(z, "sequential").x
    with torch.no_grad():
        flow.blocks[0].linears[0].weight.mul_(1.5)
    assert (flow.decode(z, "sequential").x - before).abs().max() > 1e-3
    flow.blocks[0].linears[0].weight.data.div_(1.5)
    torch.testing.assert_close(flow.decode(z, "sequential").x, before, atol=1e-4, rtol=1e-4)


def test_threads_are_given_back() -> None:
    flow = jf.MAF(jf.MAFConfig(features=4, blocks=1, hidden=(8,)))
    count = torch.get_num_threads()
    flow.sample(3, seed=0)
    with pytest.raises(ValueError, match="on_failure"):
        flow.sample(3, seed=0, on_failure="never")
    assert torch.get_num_threads() == count
