"""The C engine for transformers against torch in double precision, on awkward shapes."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core.block import Block
from jacobiflow.flows.masked_mlp import MaskedMLP
from jacobiflow.kernels import build, c_transformer
from jacobiflow.kernels.c_transformer import CCache, CTransformerEngine, PackedTransformer
from subjects import maf
from subjects import tarflow as perturbed

SHAPES = {
    "small": {"image_size": 6, "patch_size": 2, "width": 8, "head_dim": 4},
    "one head": {"image_size": 10, "patch_size": 2, "width": 24, "head_dim": 24},
    "many heads": {"image_size": 9, "patch_size": 3, "image_channels": 3, "width": 40, "head_dim": 8},
    "round": {"image_size": 28, "patch_size": 4, "width": 128, "head_dim": 64},
    "shift only": {"image_size": 8, "patch_size": 2, "width": 16, "head_dim": 16, "volume_preserving": True},
}
G = jf.Guidance
GUIDANCE = {
    "none": G(),
    "ab": G(weight=0.7),
    "a": G(weight=0.7, what="a"),
    "b": G(weight=0.7, what="b"),
    "annealed": G(weight=1.0, annealed=True),
    "temperature": G(weight=0.5, attn_temp=1.7),
}
CLOSE = {"atol": 2e-5, "rtol": 1e-5}  # float32 against float64


@pytest.fixture(autouse=True)
def there() -> None:
    assert build.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_transformer, "thread_count", lambda: request.param)


def made(shape: str = "many heads", **options: object) -> jf.TarFlow:
    return perturbed(0.1, blocks=2, layers_per_block=2, num_classes=4, **SHAPES[shape] | options)


def pair(flow: jf.TarFlow, n: int, guidance: jf.Guidance = GUIDANCE["none"]) -> tuple[Block, Block]:
    """A block in C, and the same in torch in double precision; rows have labels, one in five has none."""
    exact = copy.deepcopy(flow).double().requires_grad_(False)
    options = {"labels": torch.arange(n) % 5 - 1, "guidance": guidance}
    ours = flow.bound_blocks(n, **options, backend="c")[1]
    return ours, exact.bound_blocks(n, **options, backend="torch")[1]


def inputs(flow: jf.TarFlow, n: int) -> Tensor:
    return flow.noise(n, seed=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("n", "guidance"), [*((n, "none") for n in (1, 2, 3, 11)), (1, "temperature"), (3, "temperature")]
)
@torch.no_grad()
def test_parameters_are_torchs(shape: str, n: int, guidance: str, threads: None) -> None:
    flow = made(shape)
    ours, exact = pair(flow, n, GUIDANCE[guidance])
    x, end, engine = inputs(flow, n), ours.length, ours.engine
    want = exact.conditioner.all_params(x.double()).float()
    assert want[:, 1:].std() > 0.05
    torch.testing.assert_close(engine.params(x, 1, end - 1, None), want[:, 1:], **CLOSE)
    torch.testing.assert_close(engine.params(x, 3, end - 4, None), want[:, 3 : end - 1], **CLOSE)
    cache = engine.new_cache(n)
    for start, stop in ((1, 2), (2, 3), (3, 6), (6, end), (4, end), (2, 4)):
        found = engine.params(x, start, stop - start, cache)
        torch.testing.assert_close(found, want[:, start:stop], **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("guidance", ["none", "annealed"])
@torch.no_grad()
def test_each_row_has_its_own_window(shape: str, guidance: str, threads: None) -> None:
    """Entries that a window must write are NaN before. Some rows are solved, some are beyond the end."""
    flow, n = made(shape), 13
    ours, exact = pair(flow, n, GUIDANCE[guidance])
    x, end, engine = inputs(flow, n), ours.length, ours.engine
    want = exact.conditioner.all_params(x.double()).float()
    for width in (1, 2, 5, end):
        starts = 1 + torch.arange(n) * 5 % (end - 1)
        starts[3], starts[7] = end - 1, end
        cache = engine.new_cache(n)
        engine.params(x, 1, end - 1, cache)
        for i, start in enumerate(starts.tolist()):
            for t in range(start - 1, end):
                cache.k[:, i, ..., t // 16, :, t % 16] = cache.v[:, i, ..., t // 16, t % 16, :] = torch.nan
        before = x.clone()
        x[:, -1] = torch.nan  # never read
        for kept in (cache, None):
            theta = engine.params(x, starts, width, kept)
            for i, start in enumerate(starts.tolist()):
                stop = min(start + width, end)
                torch.testing.assert_close(theta[i, : stop - start], want[i, start:stop], **CLOSE)
                assert (theta[i, stop - start :] == 0).all()
        x = before
        further = (starts + width).clamp_max(end)  # which reads what the first window wrote
        theta = engine.params(x, further, 2, cache)
        for i, start in enumerate(further.tolist()):
            stop = min(start + 2, end)
            torch.testing.assert_close(theta[i, : stop - start], want[i, start:stop], **CLOSE)


@pytest.mark.parametrize(
    ("shape", "guidance"),
    [pair for pair in product(("small", "shift only"), GUIDANCE) if pair != ("shift only", "a")],
)  # a flow that only shifts has no a
@torch.no_grad()
def test_a_window_per_row_is_torchs(shape: str, guidance: str) -> None:
    """The reference engine of the same precision, given the same calls; both caches are filled alike."""
    flow, n = made(shape), 9
    ours, _ = pair(flow, n, GUIDANCE[guidance])
    theirs = flow.bound_blocks(n, labels=torch.arange(n) % 5 - 1, guidance=GUIDANCE[guidance], backend="torch")[1]
    x, end = inputs(flow, n), ours.length
    caches = [block.engine.new_cache(n) for block in (ours, theirs)]
    starts, draw = torch.ones(n, dtype=torch.long), torch.Generator().manual_seed(0)
    while (starts < end - 1).any():
        mine, its = (
            block.engine.params(x, starts, 3, cache) for block, cache in zip((ours, theirs), caches, strict=True)
        )
        for i, start in enumerate(starts.tolist()):
            torch.testing.assert_close(mine[i, : end - start], its[i, : end - start], atol=2e-5, rtol=1e-5)
        starts = (starts + torch.randint(1, 4, (n,), generator=draw)).clamp_max(end - 1)


CALLS = [(1, "none"), (11, "none"), (1, "temperature"), *((3, name) for name in GUIDANCE)]


@pytest.mark.parametrize(
    ("n", "guidance", "shape"),
    [(*call, shape) for call, shape in product(CALLS, SHAPES) if (call[1], shape) != ("a", "shift only")],
)  # a flow that only shifts has no a
@torch.no_grad()
def test_one_position_after_the_other_in_one_call(shape: str, n: int, guidance: str, threads: None) -> None:
    flow = made(shape)
    ours, exact = pair(flow, n, GUIDANCE[guidance])
    z, end = inputs(flow, n), ours.length
    want = jf.decode(exact, exact.from_positions(z.double()), jf.Method(width=1))
    x, slopes, cache = (
        torch.full((n, end + 2, z.shape[2]), 3.0),
        torch.zeros(n, end + 2),
        ours.engine.new_cache(n),
    )
    seen = x[:, :end]  # rows that are apart
    seen[:, 0] = z[:, 0]
    for start, stop in ((1, 4), (4, 4), (4, 5), (5, end)):
        ours.engine.solve(seen, z, slopes[:, :end], start, stop, cache)
    torch.testing.assert_close(seen, exact.to_positions(want.x).float(), **CLOSE)
    torch.testing.assert_close(slopes.sum(1), want.log_det.float(), atol=1e-4, rtol=1e-5)
    assert (x[:, end:] == 3).all()
    again = ours.engine.params(seen, end - 1, 1, cache)  # the cache holds what the call read
    exact_theta = exact.conditioner.all_params(exact.to_positions(want.x))[:, -1:]
    torch.testing.assert_close(again, exact_theta.float(), **CLOSE)


@torch.no_grad()
def test_rows_in_pieces_are_solved_too() -> None:
    flow = made()
    ours, _ = pair(flow, 4)
    z = inputs(flow, 4)
    found = []
    for x in (z.clone(), z.transpose(1, 2).contiguous().transpose(1, 2)):
        slopes, cache = torch.zeros(4, ours.length), ours.engine.new_cache(4)
        ours.engine.solve(x, z, slopes, 1, ours.length, cache)
        found.append((x, slopes))
    assert (found[0][0] - z).abs().max() > 0.1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_all_rows_are_solved_alike() -> None:
    flow = made("round", width=64)
    z = inputs(flow, 60)
    whole = flow.decode(z, "sequential", backend="c").x
    for n in (1, 2, 7, 33):
        assert torch.equal(flow.decode(z[:n], "sequential", backend="c").x, whole[:n])
    # position by position, from Python
    watched = flow.decode(z[:5], "sequential", watch=lambda sweep: None, backend="c").x
    torch.testing.assert_close(watched, whole[:5], atol=1e-5, rtol=1e-5)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Another type for tensors that nobody gave one."""
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("plan", ["sequential", "uniform"])
@pytest.mark.parametrize("family", ["tarflow", "guided", "maf"])
def test_torchs_default_type_does_not_matter(family: str, plan: str, default: torch.dtype) -> None:
    flow = maf(0.5, features=20, hidden=(40, 40)) if family == "maf" else made()
    options = {"guidance": G(weight=0.5, attn_temp=2)} if family == "guided" else {}
    z = flow.noise(30, seed=0)
    want = flow.decode(z, plan, **options).x
    assert want.isfinite().all()
    torch.set_default_dtype(default)
    assert torch.equal(flow.decode(z, plan, **options).x, want)


@pytest.mark.parametrize("family", ["tarflow", "maf"])
def test_autocast_is_torchs_business(family: str) -> None:
    flow = made() if family == "tarflow" else maf(0.3, features=17, hidden=(40, 40), context=3)
    z = flow.noise(30, seed=0)
    given = {"labels": torch.arange(30) % 4} if family == "tarflow" else {"context": torch.randn(30, 3)}
    with torch.autocast("cpu", torch.bfloat16):
        found = flow.decode(z, "sequential", **given).x
        assert torch.equal(flow.decode(z, "sequential", backend="torch", **given).x, found)
        if family == "tarflow":
            with pytest.raises(ValueError, match="does not support"):
                flow.decode(z, "sequential", backend="c", **given)
    assert found.isfinite().all()
    fresh = copy.deepcopy(flow).decode(z, "sequential", **given).x
    assert torch.equal(flow.decode(z, "sequential", **given).x, fresh)  # nothing of it was kept


@torch.no_grad()
def test_batches_of_every_size(threads: None) -> None:
    """Rows are dealt to threads, groups and tiles in many ways; none of them shows."""
    flow = made("round", width=64)
    x, labels = inputs(flow, 200), torch.arange(200) % 4
    whole = flow.bound_blocks(200, labels=labels, backend="c")[0].engine.params(x, 1, 48, None)
    starts = 1 + torch.arange(200) * 7 % 48
    for n in (0, 1, 2, 5, 6, 7, 12, 13, 64, 65, 193):
        engine = flow.bound_blocks(n, labels=labels[:n], backend="c")[0].engine
        torch.testing.assert_close(engine.params(x[:n], 1, 48, None), whole[:n], atol=1e-5, rtol=1e-5)
        cache = engine.new_cache(n)
        engine.params(x[:n], 1, 19, cache)
        step = engine.params(x[:n], 20, 1, cache)
        torch.testing.assert_close(step, whole[:n, 19:20], atol=1e-5, rtol=1e-5)
        engine.params(x[:n], 1, 48, cache)
        mixed = engine.params(x[:n], starts[:n], 3, cache)
        for i, start in enumerate(starts[:n].tolist()):
            want = whole[i, start - 1 : start + 2]
            torch.testing.assert_close(mixed[i, : len(want)], want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n", [1, 3])
@torch.no_grad()
def test_wide_and_long(n: int, threads: None) -> None:
    """Weights that are fetched ahead, and more rows than go through a step together."""
    flow = made("round", patch_size=1, image_size=20, width=256)
    ours, exact = pair(flow, n)
    x, end, engine = inputs(flow, n), ours.length, ours.engine
    want = exact.conditioner.all_params(x.double()).float()
    torch.testing.assert_close(engine.params(x, 1, end - 1, None), want[:, 1:], **CLOSE)
    cache, at = engine.new_cache(n), 1
    for width in (201, 1, 3, 7, 10, 16, 30, 64, end - 333):
        found = engine.params(x, at, width, cache)
        torch.testing.assert_close(found, want[:, at : at + width], **CLOSE)
        at += width
    assert at == end


def test_callers_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them has the other threads, the rest work alone; a child of fork() has threads of its own."""
    monkeypatch.setattr(c_transformer, "thread_count", lambda: 3)
    flow = made("round", width=64)
    z = flow.noise(7, seed=0)
    want = flow.decode(z, "selective", backend="c").x
    found: list[Tensor] = []

    def decode() -> None:
        for _ in range(5):
            found.append(flow.decode(z, "selective", backend="c").x)

    callers = [threading.Thread(target=decode) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 15
    for x in found:
        torch.testing.assert_close(x, want, atol=1e-4, rtol=1e-4)
    child = os.fork()
    if not child:
        with torch.no_grad():
            same = flow.bound_blocks(7, backend="c")[0].engine.params(z, 1, 48, None)
        os._exit(0 if same.isfinite().all() else 1)
    assert os.waitpid(child, 0)[1] == 0


@torch.no_grad()
def test_strided_and_sliced_inputs() -> None:
    flow = made()
    ours, _ = pair(flow, 3)
    x, width = inputs(flow, 6), ours.length - 1
    want = ours.engine.params(x[::2].contiguous(), 1, width, None)
    assert torch.equal(ours.engine.params(x[::2], 1, width, None), want)
    turned = x.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(ours.engine.params(turned[::2], 1, width, None), want)
    starts = torch.tensor([[4, 0], [2, 0], [1, 0]])[:, 0]
    assert torch.equal(ours.engine.params(x[::2], starts, 2, None)[0], want[0, 3:5])


def test_other_types_are_refused() -> None:
    flow = made()
    ours, _ = pair(flow, 2)
    with pytest.raises(ValueError, match=r"x is torch.float64, the network torch.float32: cast"):
        ours.engine.params(inputs(flow, 2).double(), 1, 2, None)


@pytest.mark.parametrize("guidance", ["none", "temperature"])
@torch.no_grad()
def test_selected_rows_keep_what_is_cached(guidance: str) -> None:
    flow = made()
    ours, exact = pair(flow, 5, GUIDANCE[guidance])
    x, rows, end = inputs(flow, 5), torch.tensor([4, 1]), ours.length
    want = exact.conditioner.all_params(x.double()).float()
    cache = ours.engine.new_cache(5)
    ours.engine.params(x, 1, 4, cache)
    fewer, before = cache.select(rows), cache.k.clone()
    found = ours.engine.select(rows).params(x[rows], 5, end - 5, fewer)
    torch.testing.assert_close(found, want[rows, 5:], **CLOSE)
    assert torch.equal(cache.k[..., 0, :, :4], before[..., 0, :, :4])
    scattered = ours.engine.select(rows).params(x[rows], torch.tensor([2, 4]), 2, cache.select(rows))
    torch.testing.assert_close(scattered, torch.stack((want[4, 2:4], want[1, 4:6])), **CLOSE)


@pytest.mark.parametrize("guidance", ["none", "ab"])
@torch.no_grad()
def test_a_sample_that_overflows_is_alone(guidance: str) -> None:
    """Neither other samples nor its own earlier positions notice: 0 * NaN would be NaN."""
    flow = made("round", width=64)
    ours, _ = pair(flow, 9, GUIDANCE[guidance])
    x, cache = inputs(flow, 9), ours.engine.new_cache(9)
    want = ours.engine.params(x, 1, 48, None)
    for bad in (float("nan"), float("inf"), 3e38):
        for place in (0, 20, 21, 22, 23, 24, 25, 47):
            spoiled = x.clone()
            spoiled[4, place] = bad
            for kept in (None, cache):
                theta = ours.engine.params(spoiled, 1, 48, kept)
                assert not theta[4, place:].isfinite().all(-1).any()
                torch.testing.assert_close(theta[4, :place], want[4, :place], atol=1e-5, rtol=1e-5)
                keep = [0, 1, 2, 3, 5, 6, 7, 8]
                torch.testing.assert_close(theta[keep], want[keep], atol=1e-5, rtol=1e-5)
    cache.zero_nonfinite()  # entry 47 is spoiled; no window below it sees that
    torch.testing.assert_close(ours.engine.params(x, 40, 7, cache), want[:, 39:46], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 4, 9, None])
@pytest.mark.parametrize("guidance", ["none", "temperature"])
@pytest.mark.parametrize("cache", [True, False])
def test_whole_decodings_are_torchs(width: int | None, guidance: str, cache: bool, threads: None) -> None:
    flow = made("round", width=64)
    z = flow.noise(5, seed=3)
    plan = jf.Plan((jf.Method(width=width, tol=1e-5),) * 2)
    options = {"labels": torch.arange(5) % 4, "guidance": GUIDANCE[guidance], "cache": cache}
    ours = flow.decode(z, plan, check=True, backend="c", **options)
    theirs = flow.decode(z, plan, backend="torch", **options)
    torch.testing.assert_close(ours.x, theirs.x, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.log_det, theirs.log_det, atol=1e-3, rtol=1e-4)
    assert ours.stats.residual is not None
    assert ours.stats.residual.max() < 1e-3
    for mine, its in zip(ours.stats.blocks, theirs.stats.blocks, strict=True):
        assert (mine.sweeps - its.sweeps).abs().max() <= 1


@pytest.mark.parametrize("width", [1, 3, 8, None])
@pytest.mark.parametrize("guidance", ["none", "annealed"])
def test_samples_that_overflow_end_as_in_torch(width: int | None, guidance: str) -> None:
    """Half of the rows start so far out that windows overflow; some have no answer at all."""
    flow = perturbed(0.45, blocks=1, num_classes=4)
    z = flow.noise(12, seed=2)
    z[::2] *= torch.tensor([3.0, 10, 30, 100, 1e3, 1e5]).view(-1, 1, 1)
    plan = jf.Plan((jf.Method(width=width, tol=1e-6, init="previous"),))
    options = {"labels": torch.arange(12) % 4, "guidance": GUIDANCE[guidance]}
    options["warn"] = False
    ours, theirs = (flow.decode(z, plan, backend=name, **options) for name in ("c", "torch"))
    exact = copy.deepcopy(flow).double().decode(z.double(), "sequential", **options)
    mine, its = ours.stats.blocks[0], theirs.stats.blocks[0]
    failed = [status.failed for status in mine.status]
    assert failed == [status.failed for status in its.status]
    assert 0 < sum(failed) < 12
    for i, lost in enumerate(failed):
        if not lost:
            size = exact.x[i].abs().max().item()
            assert (ours.x[i] - exact.x[i]).abs().max() <= 1e-3 * max(size, 1)


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("labels", [None, []])
def test_no_samples_at_all(guidance: str, labels: Any) -> None:
    flow, guide = made("small"), GUIDANCE[guidance]
    if labels is not None or not guide.weight or guide.attn_temp != 1:
        out = flow.sample(0, labels=labels, guidance=guide, backend="c")
        assert (out.x.shape, out.log_det.shape) == ((0, *flow.data_shape), (0,))


def test_a_large_batch_is_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = made("small")
    z, labels = flow.noise(40, seed=0), torch.arange(40) % 4
    for guidance in (GUIDANCE["none"], GUIDANCE["ab"]):
        options = {"labels": labels, "guidance": guidance, "backend": "c"}
        monkeypatch.setattr(c_transformer, "CACHE_BYTES", 16 << 20)
        whole = flow.decode(z, "selective", tol=1e-3, **options)
        assert flow.bound_blocks(40, **options)[0].engine.rows > 40
        monkeypatch.setattr(c_transformer, "CACHE_BYTES", 0)
        assert flow.bound_blocks(40, **options)[0].engine.rows == 16
        parts = flow.decode(z, "selective", tol=1e-3, **options)
        torch.testing.assert_close(parts.x, whole.x, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(parts.log_det, whole.log_det, atol=1e-4, rtol=1e-5)
        for mine, its in zip(parts.stats.blocks, whole.stats.blocks, strict=True):
            assert torch.equal(mine.sweeps, its.sweeps)
            assert mine.status == its.status


def test_changed_weights_count() -> None:
    flow = made()
    z = flow.noise(2, seed=0)
    before = flow.decode(z, "sequential", backend="c").x
    with torch.no_grad():
        flow.blocks[0].net.layers[0].up.weight.mul_(1.5)
    after = flow.decode(z, "sequential", backend="c").x
    assert (after - before).abs().max() > 1e-3
    flow.blocks[0].net.layers[0].up.weight.data.div_(1.5)  # leaves no trace in the tensor's version
    torch.testing.assert_close(flow.decode(z, "sequential").x, before, atol=1e-4, rtol=1e-4)
    for copied in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow))):
        torch.testing.assert_close(copied.decode(z, "sequential").x, before, atol=1e-4, rtol=1e-4)


def test_weights_are_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    flow, packed = made("small"), []
    original = PackedTransformer.__init__
    monkeypatch.setattr(
        PackedTransformer, "__init__", lambda self, *args: packed.append(self) or original(self, *args)
    )
    for n in (1, 2, 2, 17):
        flow.sample(n, seed=0, backend="c")
        flow.sample(n, seed=0, labels=1, guidance=0.5, backend="c")
    assert len(packed) == len(flow.blocks)


def test_gradients_go_through_torch() -> None:
    flow = made()
    x = flow.sample(2, seed=0).x
    flow.log_prob(x).sum().backward()
    assert flow.blocks[0].net.layers[0].up.weight.grad is not None
    flow.zero_grad()
    out = flow.decode(flow.noise(2, seed=0), "sequential", differentiable=True, backend="c")
    out.x.sum().backward()
    assert flow.blocks[0].net.layers[0].up.weight.grad.abs().max() > 0


def test_no_library_is_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = made()
    assert isinstance(flow.bound_blocks(2)[0].engine, CTransformerEngine)
    assert isinstance(flow.bound_blocks(2)[0].engine.new_cache(2), CCache)
    monkeypatch.setattr(c_transformer, "library", lambda: None)
    assert flow.bound_blocks(2)[0].engine.name == "torch"
    with pytest.raises(ValueError, match="backend 'c' does not support this flow here"):
        flow.bound_blocks(2, backend="c")


GUARDED = """
import ctypes, mmap
import torch
from subjects import tarflow
from jacobiflow.kernels import c_transformer

c_transformer.thread_count = lambda: 7
flow = tarflow(0.1, image_size=10, image_channels=3, patch_size=2, width=16, head_dim=8, blocks=1)
n, t, d = 6, *flow.latent_shape
size, page = 4 * n * t * d, mmap.PAGESIZE
room = -(-size // page) * page
area = mmap.mmap(-1, room + page)
start = ctypes.addressof(ctypes.c_char.from_buffer(area))
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + room), page, 0) == 0
floats = (ctypes.c_float * (n * t * d)).from_address(start + room - size)
x = torch.frombuffer(floats, dtype=torch.float32).view(n, t, d)
x[:] = flow.noise(n, seed=0)
with torch.no_grad():
    engine = flow.bound_blocks(n, backend="c")[0].engine
    cache = engine.new_cache(n)
    engine.params(x, 1, 2, cache)
    got = engine.params(x, 3, t - 3, cache)
    want = engine.params(x.clone(), 3, t - 3, None)
    engine.params(x, torch.arange(n) + t - n, t, cache)
print((got - want).abs().max().item() < 1e-4)
"""


def test_nothing_is_read_beyond_the_input() -> None:
    """Six samples of 22 positions for seven threads: shares of four would leave the last with none."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


@pytest.mark.parametrize("family", ["tarflow", "maf"])
def test_threads_wait_for_new_weights(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread packs changed weights, no other goes on with the old ones."""
    flow = made("small").eval() if family == "tarflow" else maf(0.5, features=6, hidden=(8,)).float()
    z = flow.noise(2, seed=0)
    flow.decode(z, "sequential")
    with torch.no_grad():
        for p in flow.parameters():
            p.mul_(1.1)
    packing = threading.Event()
    kind, name = (PackedTransformer, "__init__") if family == "tarflow" else (MaskedMLP, "_pack")
    original = getattr(kind, name)

    def slow(self: Any, *args: Any) -> Any:
        packing.set()
        time.sleep(0.05)
        return original(self, *args)

    monkeypatch.setattr(kind, name, slow)
    found: list[Tensor] = []
    first = threading.Thread(target=lambda: found.append(flow.decode(z, "sequential").x))
    first.start()
    assert packing.wait(10)
    second = flow.decode(z, "sequential").x
    first.join()
    want = copy.deepcopy(flow).decode(z, "sequential").x
    assert torch.equal(second, want)
    assert torch.equal(found[0], want)
