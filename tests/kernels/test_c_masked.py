"""The C backend for masked networks against torch's, in double precision."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import jacobiflow as jf
from formulas import MAPS
from jacobiflow.core.bijectors import Bijector, ExpAffine, ScaleAffine, Shift
from jacobiflow.core.block import Block, MaskedNetwork, Start, take
from jacobiflow.flows.masked_mlp import ACTIVATIONS, MaskedConditioner, MaskedMLP
from jacobiflow.kernels import build, c_engine, c_masked
from jacobiflow.kernels.backend import TorchEngine, bind
from jacobiflow.kernels.c_masked import CMaskedEngine, activation_code
from subjects import maf

SOLVED = [name for name in MAPS if name != "shift"]

SHAPES = {
    "plain": {"features": 37, "hidden": (50, 33)},
    "one layer": {"features": 20, "hidden": (70,)},
    "residual": {"features": 29, "hidden": (48, 48, 48), "residual": True},
    "context": {"features": 18, "hidden": (40, 24), "context": 3},
    "residual context": {"features": 18, "hidden": (40, 40), "context": 3, "residual": True},
    "spline": {"features": 21, "hidden": (32, 32), "transform": "spline"},
    "few units": {"features": 40, "hidden": (12, 7)},
}
CLOSE = {"atol": 2e-5, "rtol": 2e-5}


@pytest.fixture(autouse=True)
def there() -> None:
    assert build.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


def pair(n: int, bijector: Bijector | None = None, **shape: object) -> tuple[Block, Block, Tensor]:
    """A block in single precision by C, in double precision by torch, and inputs."""
    flow = maf(0.7, blocks=1, **shape)
    context = torch.randn(n, flow.context_features) if flow.context_features else None
    ours = flow.bound_blocks(n, context=context, backend="c")[0]
    exact = copy.deepcopy(flow).double()
    wide = None if context is None else context.double()
    theirs = exact.bound_blocks(n, context=wide, backend="torch")[0]
    if bijector is not None:
        ours, theirs = (bind(b.conditioner, bijector, None, name) for b, name in ((ours, "c"), (theirs, "torch")))
    return ours, theirs, torch.randn(n, flow.config.features, 1)


def steps(exact: Block, z: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, T, 1] and log |dx/dz| [n, T], one position after the other in double precision."""
    z = z.double()
    first, slope = exact.bijector.inverse(z[:, :1], exact.conditioner.first(len(z)))
    x, slopes = torch.zeros_like(z), z.new_zeros(z.shape[:2])
    x[:, :1], slopes[:, :1] = first, slope[..., 0]
    engine = TorchEngine(exact.conditioner, exact.bijector)
    engine.solve(x, z, slopes, 1, exact.length, engine.new_cache(len(z)))
    return x, slopes


def begin(x: Tensor, filled: float = 3.0) -> tuple[Tensor, Tensor]:
    """Room for x and its slopes, as views of longer rows; position 0 is there."""
    n, length, _ = x.shape
    found, slopes = torch.full((n, length + 5, 1), filled), torch.full((n, length + 3), filled)
    found[:, 0] = x[:, 0].float()
    return found[:, :length], slopes[:, :length]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 13])
@torch.no_grad()
def test_parameters_are_torchs(shape: str, threads: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_masked, "thread_count", lambda: threads)
    ours, exact, x = pair(n, **SHAPES[shape])
    end, engine = ours.length, ours.engine
    want = exact.conditioner.all_params(x.double()).float()
    assert want.std() > 0.05
    torch.testing.assert_close(engine.params(x, 1, end - 1, None), want[:, 1:], **CLOSE)
    cache = engine.new_cache(n)
    for lo, hi in itertools.pairwise(sorted({1, 2, 3, end // 2, end // 2 + 1, end})):
        torch.testing.assert_close(engine.params(x, lo, hi - lo, cache), want[:, lo:hi], **CLOSE)
    starts = torch.randint(1, end - 3, (n,))
    torch.testing.assert_close(engine.params(x, starts, 4, None), take(want, starts, 4), **CLOSE)
    again = engine.params(x, end // 2, end - end // 2, cache)  # over what was there already
    torch.testing.assert_close(again, want[:, end // 2 :], **CLOSE)


def slide(ours: Block, exact: Block, x: Tensor, width: int, beyond: float, seed: int = 0, turns: int = 60) -> None:
    """Windows that slide, each row at its own pace: inputs from the frontier on are other guesses in every
    sweep, those beyond the window of the size `beyond`. Rows leave now and then."""
    draw, n, end = torch.Generator().manual_seed(seed), len(x), ours.length
    engine, conditioner, final = ours.engine, exact.conditioner, x
    cache, frontier = engine.new_cache(n), torch.ones(n, dtype=torch.long)
    at = torch.arange(end)
    for turn in range(turns):
        guess = torch.randn(final.shape, generator=draw)
        guess = torch.where((at >= frontier[:, None] + width - 1)[..., None], beyond * guess, guess)
        seen = torch.where((at < frontier[:, None])[..., None], final, guess)
        start: Start = frontier.clamp_max(end - 1)
        if bool((frontier == frontier[0]).all()):
            start = int(frontier[0].clamp_max(end - 1))
        wide = width if isinstance(start, Tensor) else min(width, end - start)
        theta = engine.params(seen, start, wide, cache)
        assert theta.isfinite().all()
        first = start if isinstance(start, Tensor) else torch.full((len(final),), start)
        own = (first[:, None] + torch.arange(wide) < end)[..., None]
        want = take(conditioner.all_params(seen.double()), first, wide)
        torch.testing.assert_close(torch.where(own, theta, 0), torch.where(own, want.float(), 0), **CLOSE)
        if bool((frontier >= end).all()):
            break
        advance = torch.randint(0, width + 1, frontier.shape, generator=draw)
        advance = torch.minimum(advance, (end - frontier).clamp_min(0))
        # What became final is what the units of this sweep were computed from, but for the last of it.
        moved = (at >= frontier[:, None]) & (at < (frontier + advance - 1)[:, None])
        final = torch.where(moved[..., None], seen, final)
        frontier = frontier + advance
        if turn == 7 and len(final) > 3:
            keep = torch.arange(len(final))[1::2].flip(0)
            cache, engine = cache.select(keep), engine.select(keep)
            conditioner, final, frontier = conditioner.select(keep), final[keep], frontier[keep]
    else:
        assert not turns, "the windows did not reach the end"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [1, 5, 13])
@torch.no_grad()
def test_every_row_has_its_own_window(shape: str, n: int) -> None:
    ours, exact, x = pair(n, **SHAPES[shape])
    for width in (2, 5, ours.length // 2):
        slide(ours, exact, x, width, 1.0)


@torch.no_grad()
def test_windows_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a group of them, in three threads."""
    monkeypatch.setattr(c_masked, "thread_count", lambda: 3)
    ours, exact, x = pair(401, **SHAPES["residual context"])
    slide(ours, exact, x, 4, 1.0)


@pytest.mark.parametrize("shape", ["plain", "residual", "few units"])
@torch.no_grad()
def test_a_row_keeps_nothing_from_beyond_its_window(shape: str) -> None:
    """Units of guesses there may be infinite, and 0 * inf is NaN: no other row's window may bring them in."""
    ours, exact, x = pair(9, **SHAPES[shape])
    want = exact.conditioner.all_params(x.double()).float()
    starts, width = torch.tensor([1, 20, 3, 11, 25, 2, 24, 6, 15]), 4
    at = torch.arange(ours.length)
    cache = ours.engine.new_cache(9)
    ours.engine.params(x, 1, ours.length - 1, cache)
    before = cache.select(torch.arange(9))
    odd = torch.where((at > starts[:, None] + width - 2)[..., None], 3e38 * x.sign(), x)
    theta = ours.engine.params(odd, starts, width, cache)
    torch.testing.assert_close(theta, take(want, starts, width), **CLOSE)
    for mine, its in zip((*cache.nodes, *cache.active), (*before.nodes, *before.active), strict=True):
        torch.testing.assert_close(mine, its, **CLOSE)


@torch.no_grad()
def test_settled_units_are_left_alone() -> None:
    """Even those that share a panel with units that are computed anew from inputs that overflow."""
    ours, exact, x = pair(3, **SHAPES["plain"])
    want = exact.conditioner.all_params(x.double()).float()
    for start in (11, torch.tensor([11, 13, 12])):
        cache = ours.engine.new_cache(3)
        ours.engine.params(x, 1, 19, cache)
        spoiled = x.clone()
        spoiled[:, 13:] = float("inf")
        assert not ours.engine.params(spoiled, start, 9, cache).isfinite().all()
        cache.zero_nonfinite()
        assert all(t.isfinite().all() for t in (*cache.nodes, *cache.active))
        found = ours.engine.params(x, start, 9, cache)
        torch.testing.assert_close(found, take(want, start, 9), **CLOSE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_every_activation(activation: str) -> None:
    ours, exact, x = pair(9, features=24, hidden=(64, 64), activation=activation)
    want = exact.conditioner.all_params(3 * x.double()).float()
    torch.testing.assert_close(ours.engine.params(3 * x, 1, 23, None), want[:, 1:], **CLOSE)


@torch.no_grad()
def test_batches_of_every_size() -> None:
    ours, _, x = pair(230, features=30, hidden=(64, 64))
    whole = ours.engine.params(x, 1, 29, None)
    for n in (0, 1, 5, 6, 12, 96, 97, 193):
        torch.testing.assert_close(ours.engine.params(x[:n], 1, 29, None), whole[:n], **CLOSE)
        starts = torch.full((n,), 3)
        torch.testing.assert_close(ours.engine.params(x[:n], starts, 5, None), whole[:n, 2:7], **CLOSE)


@torch.no_grad()
def test_rows_need_not_be_in_one_piece() -> None:
    ours, exact, x = pair(4, **SHAPES["plain"])
    want = exact.conditioner.all_params(x.double()).float()[:, 1:]
    apart = F.pad(x, (0, 0, 0, 7))[:, : ours.length]
    turned = x[..., 0].T.contiguous().T[..., None]
    assert apart.stride(0) > ours.length
    assert turned.stride(1) != 1
    for given in (apart, turned):
        torch.testing.assert_close(ours.engine.params(given, 1, ours.length - 1, None), want, **CLOSE)
    z, (x, slopes) = apart, steps(exact, apart)
    found, log = (t.T.contiguous().T for t in (begin(x)[0][..., 0], begin(x)[1]))
    ours.engine.solve(found[..., None], z, log, 1, ours.length, ours.engine.new_cache(4))
    torch.testing.assert_close(found, x[..., 0].float(), **CLOSE)
    torch.testing.assert_close(log[:, 1:], slopes[:, 1:].float(), **CLOSE)


def converted(net: MaskedNetwork) -> MaskedNetwork:
    """In double precision."""
    stages = tuple(
        replace(
            s,
            weight=s.weight.double(),
            bias=s.bias.double(),
            norm=None if s.norm is None else (s.norm[0].double(), s.norm[1].double()),
        )
        for s in net.stages
    )
    return replace(net, stages=stages, head=net.head.double(), head_bias=net.head_bias.double())


def check(net: MaskedNetwork, terms: Mapping[int, Tensor], bijector: Bijector, n: int = 20) -> None:
    """Windows and one call, of a network as plain data with these terms."""

    def none(x: Tensor, context: Tensor | None) -> Tensor:
        raise AssertionError("not for decoding")

    context = torch.zeros(n, 1)
    ours = bind(MaskedConditioner(net, none, (), context, terms), bijector, None, "c")
    wide = {i: t.double() for i, t in terms.items()}
    theirs = bind(MaskedConditioner(converted(net), none, (), context, wide), bijector, None, "torch")
    assert ours.engine.name == "c"
    for rows in (torch.arange(n), torch.tensor([3, 1, 1]), torch.arange(n)[2:3]):
        some, exact, x = ours.select(rows), theirs.select(rows), torch.randn(len(rows), net.length, 1)
        mine, its = some.engine.new_cache(len(rows)), exact.engine.new_cache(len(rows))
        for start, width in ((1, 3), (4, 5), (torch.randint(4, 10, (len(rows),)), 3)):
            want = exact.engine.params(x.double(), start, width, its).float()
            torch.testing.assert_close(some.engine.params(x, start, width, mine), want, **CLOSE)
        want, slopes = steps(exact, x)
        found, log = begin(want)
        some.engine.solve(found, x, log, 1, net.length, some.engine.new_cache(len(rows)))
        torch.testing.assert_close(found, want.float(), **CLOSE)
        torch.testing.assert_close(log[:, 1:], slopes[:, 1:].float(), **CLOSE)


@pytest.mark.parametrize("shared", [(True, True), (False, False), (True, False)])
@torch.no_grad()
def test_context_of_one_row_or_of_all(shared: tuple[bool, bool]) -> None:
    ours, _, _ = pair(5, **SHAPES["residual context"])
    assert isinstance(ours.conditioner, MaskedConditioner)
    net = ours.conditioner.network
    terms = {i: torch.randn(40, 1 if one else 20) for i, one in zip((0, 2), shared, strict=True)}
    check(net, terms, ours.bijector)


@pytest.mark.parametrize("shape", ["plain", "residual"])
@pytest.mark.parametrize("lit", [True, False])
@torch.no_grad()
def test_batch_norm_and_heads_that_read_raw_units(shape: str, lit: bool) -> None:
    ours, _, _ = pair(5, **SHAPES[shape])
    assert isinstance(ours.conditioner, MaskedConditioner)
    net = ours.conditioner.network
    stages = tuple(
        replace(s, norm=(1 + 0.3 * torch.randn_like(s.bias), 0.3 * torch.randn_like(s.bias))) for s in net.stages
    )
    check(replace(net, stages=stages, head_activated=lit), {}, ours.bijector)


@pytest.mark.parametrize("plan", ["sequential", "selective", jf.Plan((jf.Method(width=4, tol=1e-5),) * 3)])
@pytest.mark.parametrize("shape", ["plain", "residual context", "spline"])
def test_whole_decodings_are_torchs(plan: str | jf.Plan, shape: str) -> None:
    flow = maf(0.5, blocks=3, **SHAPES[shape])
    z = flow.noise(20, seed=0)
    options = {"context": torch.randn(20, flow.context_features)} if flow.context_features else {}
    assert {b.engine.name for b in flow.bound_blocks(20, **options)} == {"c"}
    ours, theirs = (flow.decode(z, plan, check=True, backend=name, **options) for name in ("c", "torch"))
    torch.testing.assert_close(ours.x, theirs.x, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(ours.log_det, theirs.log_det, atol=1e-3, rtol=1e-3)
    for mine, its in zip(ours.stats.blocks, theirs.stats.blocks, strict=True):
        assert (mine.sweeps - its.sweeps).abs().max() <= 1
    if plan == "sequential":
        frames: list[Tensor] = []
        seen = flow.decode(z, plan, watch=lambda s: frames.append(s.x), **options)  # a call per position
        assert len(frames) == 3 * ours.stats.blocks[0].sweeps.max() + 3
        torch.testing.assert_close(seen.x, ours.x, **CLOSE)


def shape_for(name: str) -> dict[str, object]:
    return SHAPES["residual context"] | ({"transform": "spline", "bins": 5} if "spline" in name else {})


@pytest.mark.parametrize("name", SOLVED)
@pytest.mark.parametrize("n", [1, 7, 100, 203])
@torch.no_grad()
def test_one_position_after_the_other_in_one_call(name: str, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and slopes are those of single steps in double precision, whatever the stretches."""
    monkeypatch.setattr(c_masked, "thread_count", lambda: 3)
    ours, exact, z = pair(n, MAPS[name], **shape_for(name))
    end, engine = ours.length, ours.engine
    want, slopes = steps(exact, z)
    assert n == 1 or (slopes.std(0) > 1e-3).sum() > end // 2
    for edges in ((1, end), (1, 2, 4, 5, 11, end)):
        (x, log), cache = begin(want), engine.new_cache(n)
        for lo, hi in itertools.pairwise(edges):
            engine.solve(x, z, log, lo, hi, cache)
            assert (x[:, hi:] == 3).all()
            assert (log[:, hi:] == 3).all()
        torch.testing.assert_close(x, want.float(), **CLOSE)
        torch.testing.assert_close(log[:, 1:], slopes[:, 1:].float(), **CLOSE)
    x, log = begin(want)
    engine.solve(x, z, log, 1, end, None)
    torch.testing.assert_close(x, want.float(), **CLOSE)


@pytest.mark.parametrize("n", [5, 100])
@torch.no_grad()
def test_windows_go_on_where_one_call_ended(n: int) -> None:
    """Few rows keep their units, many do not."""
    ours, exact, z = pair(n, **SHAPES["plain"])
    want, slopes = steps(exact, z)
    theta, engine, rows = exact.conditioner.all_params(want).float(), ours.engine, torch.arange(n).flip(0)
    (x, log), cache = begin(want), engine.new_cache(n)
    engine.params(want.float(), 1, 6, cache)
    engine.solve(x, z, log, 5, 14, cache)  # x is 3 at positions 1 .. 4
    x[:, 1:5] = want[:, 1:5].float()
    engine.params(x, 1, 4, cache)
    engine.solve(x, z, log, 5, 14, cache)
    whole = want.float()
    for start in (14, torch.randint(12, 15, (n,))):
        fork = cache.select(rows)
        first = start if isinstance(start, int) else start[rows]
        for _ in range(2):  # the second time from units that are there
            found = engine.select(rows).params(whole[rows], first, 5, fork)
            torch.testing.assert_close(found, take(theta[rows], first, 5), **CLOSE)
        later = first + 5
        found = engine.select(rows).params(whole[rows], later, 3, fork)
        torch.testing.assert_close(found, take(theta[rows], later, 3), **CLOSE)
    engine.solve(x, z, log, 14, 15, cache)
    engine.solve(x, z, log, 15, ours.length, cache)
    torch.testing.assert_close(x, whole, **CLOSE)
    torch.testing.assert_close(log[:, 5:], slopes[:, 5:].float(), **CLOSE)


@pytest.mark.parametrize("name", SOLVED)
@pytest.mark.parametrize("activation", ["relu", "elu", "tanh"])
@torch.no_grad()
def test_an_answer_does_not_depend_on_the_batch(name: str, activation: str) -> None:
    """To the last bit, though few rows and many are solved in different ways."""
    ours, exact, z = pair(150, MAPS[name], **{**shape_for(name), "context": 0, "activation": activation})
    start, _ = steps(exact, z)

    def solve(rows: Tensor) -> tuple[Tensor, Tensor]:
        some, (x, log) = ours.select(rows), begin(start[rows])
        some.engine.solve(x, z[rows], log, 1, ours.length, some.engine.new_cache(len(rows)))
        return x, log

    want, slopes = solve(torch.arange(150))
    for n in (1, 2, 3, 4, 5, 8, 17, 100):
        x, log = solve(torch.arange(n))
        assert torch.equal(x, want[:n])
        assert torch.equal(log, slopes[:n])


@pytest.mark.filterwarnings("ignore:.*not finite:RuntimeWarning")
@pytest.mark.parametrize("width", [1, 3, 8, None])
@pytest.mark.parametrize(("activation", "by", "most"), [("relu", 1.8, 5.0), ("elu", 1.3, 30.0)])
def test_rows_that_overflow(width: int | None, activation: str, by: float, most: float) -> None:
    """The same rows as in torch have no finite answer or need narrower windows, in any company."""
    flow = maf(by, features=23, blocks=1, hidden=(40, 24), scale="exp", activation=activation)
    z = flow.noise(24, seed=0)
    z[::3] *= torch.linspace(2, most, 8)[:, None]
    z[::3, 12:] *= 30  # guesses that overflow
    z[5, 3], z[7, 0] = float("nan"), float("inf")
    plan = jf.Plan((jf.Method(width=width, tol=1e-6, init="previous"),))
    ours, theirs = (flow.decode(z, plan, on_failure="return", backend=name) for name in ("c", "torch"))
    exact = copy.deepcopy(flow).double().decode(z.double(), "sequential", on_failure="return").x.float()
    (mine,), (its,) = ours.stats.blocks, theirs.stats.blocks
    assert [s.failed for s in mine.status] == [s.failed for s in its.status]
    assert 5 <= sum(s.failed for s in mine.status) <= 8
    narrowed = [i for i, s in enumerate(mine.status) if s is jf.Status.FELL_BACK]
    assert narrowed == [i for i, s in enumerate(its.status) if s is jf.Status.FELL_BACK]
    assert bool(narrowed) == (width in (8, None))
    assert torch.equal(ours.x.isfinite(), theirs.x.isfinite())
    solved = ours.x.isfinite().all(1)
    torch.testing.assert_close(ours.x[solved], exact[solved], atol=1e-3, rtol=1e-3)
    for i in range(0, 24, 3):
        alone = flow.decode(z[i : i + 1], plan, on_failure="return", backend="c")
        assert alone.stats.blocks[0].status[0].failed == mine.status[i].failed
        torch.testing.assert_close(alone.x[0], ours.x[i], atol=1e-3, rtol=1e-3, equal_nan=True)


def test_a_network_deeper_than_the_stack_of_a_thread() -> None:
    flow = maf(0.1, features=6, blocks=1, hidden=(4,) * 400)
    exact = copy.deepcopy(flow).double()
    z = flow.noise(3, seed=0)
    found: list[Tensor] = []
    size = threading.stack_size(512 * 1024)
    try:
        thread = threading.Thread(target=lambda: found.append(flow.decode(z, "sequential", backend="c").x))
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
    torch.testing.assert_close(flow.decode(z, "sequential", backend="c").x, want, **CLOSE)


@pytest.mark.parametrize("scale", ["softplus", "sigmoid"])
def test_scales_below_the_smallest_normal_number(scale: str) -> None:
    """Only torch tells them apart; min_scale=0 allows them."""
    flow = jf.MAF(jf.MAFConfig(features=6, blocks=1, hidden=(8,), min_scale=0.0, scale=scale))
    with torch.no_grad():
        flow.blocks[0].head.bias[::2] = -90.0 if scale == "softplus" else -88.0
    z = torch.full((3, 6), 1e-40)
    exact = copy.deepcopy(flow).double().decode(z.double(), "sequential")
    torch.testing.assert_close(flow.decode(z, "sequential").log_det, exact.log_det.float(), rtol=1e-4, atol=0)


# What is declined


class Halved(ScaleAffine):
    """Another formula under the name of one that C has."""

    def inverse(self, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
        x, log_slope = super().inverse(z, theta)
        return x / 2, log_slope - torch.tensor(2.0).log()


class Swapped(MaskedConditioner):
    """A conditioner that computes something else from the same network."""

    def params(self, x: Tensor, start: Start, width: int, cache: object) -> Tensor:
        return super().params(-x, start, width, cache)  # type: ignore[arg-type]


class Shifted(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1)


def declined(conditioner: MaskedConditioner, bijector: Bijector) -> bool:
    """Whether C leaves them to torch."""
    with pytest.raises(ValueError, match="backend 'c' does not support"):
        bind(conditioner, bijector, None, "c")
    return bind(conditioner, bijector).engine.name == "torch"


def test_other_classes_are_declined() -> None:
    ours, _, z = pair(3, **SHAPES["plain"])
    conditioner, bijector = ours.conditioner, ours.bijector
    assert isinstance(conditioner, MaskedConditioner)
    assert bind(conditioner, bijector).engine.name == "c"
    assert declined(conditioner, Halved())
    assert declined(conditioner, Shift())
    assert declined(conditioner, MAPS["spline"])  # whose parameters are of another number
    assert declined(conditioner, MAPS["shift"])  # which only transformers have
    other = Swapped(conditioner.network, conditioner.forward, conditioner.weights)
    assert declined(other, bijector)
    halved = jf.decode(bind(conditioner, Halved()), z, jf.Method(width=1)).x
    again = bind(conditioner, Halved(), None, "torch")
    assert torch.equal(halved, jf.decode(again, z, jf.Method(width=1)).x)
    assert (halved - jf.decode(ours, z, jf.Method(width=1)).x).abs().max() > 0.1


def test_other_networks_are_declined() -> None:
    ours, _, _ = pair(3, **SHAPES["residual"])
    conditioner, bijector = ours.conditioner, ours.bijector
    assert isinstance(conditioner, MaskedConditioner)
    net = conditioner.network
    first, *rest = net.stages
    others = {
        "activation": replace(net, activation=Shifted()),
        "skip from the input": replace(net, stages=(replace(first, skip=0), *rest)),
        "no stages": replace(net, stages=()),
        "double": converted(net),
        "subclass": type("Other", (MaskedNetwork,), {})(**vars(net)),
    }
    for name, other in others.items():
        assert declined(replace(conditioner, network=other), bijector), name
    assert declined(replace(conditioner, terms={0: torch.zeros(48, 1).double()}), bijector)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert declined(conditioner, bijector)


def test_without_the_library_torch_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, _ = pair(3, **SHAPES["plain"])
    assert isinstance(ours.conditioner, MaskedConditioner)
    monkeypatch.setenv("JACOBIFLOW_NATIVE", "0")
    assert build.library.__wrapped__() is None
    monkeypatch.setattr(c_masked, "library", build.library.__wrapped__)
    assert declined(ours.conditioner, ours.bijector)


def test_which_activations_are_known() -> None:
    codes = [activation_code(f) for f in (nn.ReLU(), nn.ELU(), nn.GELU(), nn.SiLU(), nn.Tanh())]
    assert [activation_code(f) for f in ACTIVATIONS.values()] == codes
    assert {0, *codes} == set(c_engine.codes_of(build.library())[1].values())  # 0 is none at all
    others = (
        nn.ELU(alpha=0.5),
        nn.GELU("tanh"),
        nn.Softplus(),
        torch.sigmoid,
        Shifted(),
        lambda x: F.relu(x),
    )
    assert [activation_code(f) for f in others] == [None] * len(others)


def test_numbers_of_another_type_are_refused() -> None:
    ours, _, z = pair(3, **SHAPES["plain"])
    with pytest.raises(ValueError, match=r"z is torch.float64, the network torch.float32: use z.to"):
        jf.decode(ours, z.double(), jf.Method(width=1))
    with pytest.raises(ValueError, match=r"use z\.to"):
        jf.decode(ours, z.double(), jf.Method(width=3))


# Weights


def test_changed_weights_count() -> None:
    flow = maf(0.5, features=12, hidden=(16, 16))
    z = flow.noise(2, seed=0)
    before = flow.decode(z, "sequential", backend="c").x
    with torch.no_grad():
        flow.blocks[0].linears[0].weight.mul_(1.5)
    assert (flow.decode(z, "sequential", backend="c").x - before).abs().max() > 1e-3
    flow.blocks[0].linears[0].weight.data.div_(1.5)
    torch.testing.assert_close(flow.decode(z, "sequential", backend="c").x, before, atol=1e-4, rtol=1e-4)


def test_weights_are_packed_once_and_dropped_with_their_network() -> None:
    def packed(flow: jf.Flow) -> c_masked.PackedNetwork:
        engine = flow.bound_blocks(1)[0].engine
        assert isinstance(engine, CMaskedEngine)
        return engine.packed

    flow = maf(0.5, features=12, hidden=(16, 16), blocks=1)
    first, net = packed(flow), flow.blocks[0]
    assert packed(flow) is first
    assert isinstance(net, MaskedMLP)
    assert c_masked._PACKED[net.reuse(net._pack)] is first
    with torch.no_grad():
        net.head.bias += 1
    assert packed(flow) is not first
    gc.collect()
    assert all(one is not first for one in c_masked._PACKED.values())


def test_gradients_of_what_c_decoded() -> None:
    flow = maf(0.5, features=12, hidden=(16, 16), blocks=1)
    assert flow.bound_blocks(3)[0].engine.name == "c"  # with gradients enabled
    found = []
    for name in ("c", "torch"):
        z = flow.noise(3, seed=0).requires_grad_()
        out = flow.decode(z, "sequential", differentiable=True, backend=name)
        found.append(torch.autograd.grad(out.x.square().sum() + out.log_det.sum(), [z, *flow.parameters()]))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-4, rtol=1e-4)


def test_one_position() -> None:
    flow = maf(0.5, features=1, hidden=(5,), blocks=2)
    z = flow.noise(4, seed=0)
    out = flow.decode(z, "sequential", backend="c", check=True)
    assert out.stats.residual is not None
    assert out.stats.residual.max() < 1e-5


def test_exp_affine_is_known_to_c() -> None:
    flow = maf(0.5, features=5, hidden=(8,), blocks=1, scale="exp")
    assert isinstance(flow.bijector, ExpAffine)
    assert flow.bound_blocks(2)[0].engine.name == "c"


def test_threads_are_given_back() -> None:
    flow = jf.MAF(jf.MAFConfig(features=4, blocks=1, hidden=(8,)))
    count = torch.get_num_threads()
    flow.sample(3, seed=0)
    with pytest.raises(ValueError, match="on_failure"):
        flow.sample(3, seed=0, on_failure="never")
    assert torch.get_num_threads() == count
