"""The compiled transformer against torch's, in double precision, on awkward shapes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core import native
from jacobiflow.core.decode import decode
from jacobiflow.core.types import Block, Method
from jacobiflow.flows import tarflow
from jacobiflow.flows.masked import MaskedMLP
from jacobiflow.flows.native_transformer import NativeCache
from subjects import maf
from subjects import tarflow as perturbed

SHAPES = {
    "small": {"image_size": 6, "patch_size": 2, "width": 8, "head_dim": 4},
    "one head": {"image_size": 10, "patch_size": 2, "width": 24, "head_dim": 24},
    "many heads": {"image_size": 9, "patch_size": 3, "image_channels": 3, "width": 40, "head_dim": 8},
    "round": {"image_size": 28, "patch_size": 4, "width": 128, "head_dim": 64},
    "shift only": {"image_size": 8, "patch_size": 2, "width": 16, "head_dim": 16, "volume_preserving": True},
}


@pytest.fixture(autouse=True)
def there() -> None:
    assert native.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"


def made(shape: str = "many heads", **options: object) -> jf.TarFlow:
    return perturbed(0.1, blocks=2, layers_per_block=2, num_classes=4, **SHAPES[shape] | options)


def pair(flow: jf.TarFlow, labels: Tensor | None, temperature: float = 1.0) -> tuple[Block, Block]:
    """A block in single precision, and torch's in double."""
    exact = copy.deepcopy(flow).double().requires_grad_(False)
    flow.requires_grad_(False)
    return flow.blocks[0].bind(labels, temperature), exact.blocks[0].bind(labels, temperature)


def inputs(flow: jf.TarFlow, n: int) -> Tensor:
    return flow.noise(n, seed=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 2, 3, 11])
def test_parameters_are_torchs(shape: str, threads: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacobiflow.flows.native_transformer.threads", lambda: threads)
    flow = made(shape)
    ours, exact = pair(flow, torch.arange(n) % 5 - 1, 1.3)
    x, end = inputs(flow, n), ours.length
    with torch.no_grad():
        want = exact.params(x.double(), 0, end).float()
        assert want[:, 1:].std() > 0.05
        close = {"atol": 2e-5, "rtol": 1e-5}
        torch.testing.assert_close(ours.params(x, 0, end), want, **close)
        torch.testing.assert_close(ours.params(x, 3, end - 1), want[:, 3 : end - 1], **close)
        cache = ours.new_cache(n)
        assert isinstance(cache, NativeCache)
        for lo, hi in ((0, 1), (1, 2), (2, 3), (3, 6), (6, end)):
            torch.testing.assert_close(ours.params(x, lo, hi, cache), want[:, lo:hi], **close)
            assert cache.valid == hi - 1
        cache.valid = 2  # what lies beyond is stale
        torch.testing.assert_close(ours.params(x, 4, end, cache), want[:, 4:], **close)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 3, 11])
def test_one_position_after_the_other_in_one_call(
    shape: str, threads: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jacobiflow.flows.native_transformer.threads", lambda: threads)
    flow = made(shape)
    ours, exact = pair(flow, torch.arange(n) % 5 - 1, 1.3)
    z, end = inputs(flow, n), ours.length
    with torch.no_grad():
        want = decode(exact, z.double(), Method(width=1))
        x, cache = torch.full_like(z, 3.0), ours.new_cache(n)
        assert ours.single(x, z, 0, 1, cache) is None  # the first position is given
        x[:, 0] = z[:, 0]
        slopes = [ours.single(x, z, lo, hi, cache) for lo, hi in ((1, 4), (4, 5), (5, end))]
        torch.testing.assert_close(x, want.x.float(), atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(torch.cat(slopes, 1).sum(1), want.log_det.float(), atol=1e-4, rtol=1e-5)
        assert cache.valid == end - 1
        cache.valid = 1
        assert ours.single(x, z, 4, end, cache) is None  # what stands before is not cached


def test_all_rows_are_solved_alike() -> None:
    flow = made("round", width=64)
    z = inputs(flow, 60)
    whole = flow.decode(z, "sequential").x
    for n in (1, 2, 7, 33):
        assert torch.equal(flow.decode(z[:n], "sequential").x, whole[:n])
    watched = flow.decode(
        z[:5], "sequential", watch=lambda sweep: None
    ).x  # position by position, from Python
    torch.testing.assert_close(watched, whole[:5], atol=1e-5, rtol=1e-5)


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """Another type for tensors that nobody gave one."""
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("plan", ["sequential", "uniform"])
@pytest.mark.parametrize("family", ["tarflow", "maf"])
def test_torchs_default_type_does_not_matter(family: str, plan: str, default: torch.dtype) -> None:
    flow = made() if family == "tarflow" else maf(0.5, features=20, hidden=(40, 40))
    z = flow.noise(30, seed=0)
    want = flow.decode(z, plan).x
    assert want.isfinite().all()
    torch.set_default_dtype(default)
    assert torch.equal(flow.decode(z, plan).x, want)


@pytest.mark.parametrize("family", ["tarflow", "maf"])
def test_autocast_is_torchs_business(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = made() if family == "tarflow" else maf(0.3, features=17, hidden=(40, 40), context=3)
    z = flow.noise(30, seed=0)
    given = {"labels": torch.arange(30) % 4} if family == "tarflow" else {"context": torch.randn(30, 3)}
    with torch.autocast("cpu", torch.bfloat16):
        found = flow.decode(z, "sequential", **given).x
        with monkeypatch.context() as switch:
            switch.setattr(native, "library", lambda: None)
            assert torch.equal(flow.decode(z, "sequential", **given).x, found)
    assert found.isfinite().all()
    fresh = copy.deepcopy(flow).decode(z, "sequential", **given).x
    assert torch.equal(flow.decode(z, "sequential", **given).x, fresh)  # nothing of it was kept


def test_batches_of_every_size() -> None:
    """Rows are dealt to threads, groups and tiles in many ways; none of them shows."""
    flow = made("round", width=64)
    x = inputs(flow, 200)
    with torch.no_grad():
        labels = torch.arange(200) % 4
        whole = flow.blocks[0].bind(labels).params(x, 0, 49)
        for n in (0, 1, 2, 5, 6, 7, 12, 13, 64, 65, 193):
            part = flow.blocks[0].bind(labels[:n])
            torch.testing.assert_close(part.params(x[:n], 0, 49), whole[:n], atol=1e-5, rtol=1e-5)
            step = part.new_cache(n)
            part.params(x[:n], 0, 20, step)
            torch.testing.assert_close(
                part.params(x[:n], 20, 21, step), whole[:n, 20:21], atol=1e-5, rtol=1e-5
            )


def test_strided_and_sliced_inputs() -> None:
    flow = made()
    ours, _ = pair(flow, None)
    x = inputs(flow, 6)
    with torch.no_grad():
        want = ours.params(x[::2].contiguous(), 0, ours.length)
        assert torch.equal(ours.params(x[::2], 0, ours.length), want)
        turned = x.transpose(1, 2).contiguous().transpose(1, 2)
        assert torch.equal(ours.params(turned[::2], 0, ours.length), want)


def test_selected_rows_keep_what_is_cached() -> None:
    flow = made()
    labels = torch.tensor([0, 3, 1, -1, 2])
    ours, _ = pair(flow, labels)
    x, rows = inputs(flow, 5), torch.tensor([4, 1])
    with torch.no_grad():
        cache = ours.new_cache(5)
        want = ours.params(x, 0, ours.length, cache)
        cache.valid = 4
        fewer = cache.select(rows)
        again = ours.select(rows).params(x[rows], 5, ours.length, fewer)
        torch.testing.assert_close(again, want[rows, 5:], atol=1e-5, rtol=1e-5)
        assert cache.valid == 4


def test_a_sample_that_overflows_is_alone() -> None:
    flow = made("round", width=64)
    x = inputs(flow, 9)
    with torch.no_grad():
        block = flow.blocks[0].bind(None)
        want = block.params(x, 0, 49)
        for bad in (float("nan"), float("inf"), 3e38):
            spoiled = x.clone()
            spoiled[4, 20] = bad
            theta = block.params(spoiled, 0, 49)
            assert not theta[4, 21:].isfinite().all()
            keep = [0, 1, 2, 3, 5, 6, 7, 8]
            torch.testing.assert_close(theta[keep], want[keep], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("plan", ["sequential", "uniform", "selective"])
@pytest.mark.parametrize("guidance", [0.0, jf.Guidance(weight=0.5, annealed=True, attn_temp=2.0)])
def test_whole_decodings_are_torchs(
    plan: str, guidance: float | jf.Guidance, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = made("round", width=64)
    z = flow.noise(5, seed=3)
    options = {"labels": torch.arange(5) % 4, "guidance": guidance}
    for cache in (True, False):
        ours = flow.decode(z, plan, cache=cache, check=True, **options)
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            theirs = flow.decode(z, plan, cache=cache, **options)
        torch.testing.assert_close(ours.x, theirs.x, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ours.log_det, theirs.log_det, atol=1e-3, rtol=1e-4)
        if plan == "sequential":
            assert ours.stats.residual is not None
            assert ours.stats.residual.max() < 1e-4


def test_a_large_batch_is_solved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    flow = made("small")
    z, labels = flow.noise(40, seed=0), torch.arange(40) % 4
    whole = flow.decode(z, "selective", tol=1e-3, labels=labels)
    monkeypatch.setattr(tarflow, "CACHE_BYTES", 0)
    block = flow.blocks[0].bind(labels)
    assert block.rows == 16
    parts = flow.decode(z, "selective", tol=1e-3, labels=labels)
    torch.testing.assert_close(parts.x, whole.x, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(parts.log_det, whole.log_det, atol=1e-4, rtol=1e-5)
    for mine, its in zip(parts.stats.blocks, whole.stats.blocks, strict=True):
        assert torch.equal(mine.sweeps, its.sweeps)
        assert mine.status == its.status


def test_changed_weights_count() -> None:
    flow = made()
    z = flow.noise(2, seed=0)
    before = flow.decode(z, "sequential").x
    with torch.no_grad():
        flow.blocks[0].net.layers[0].up.weight.mul_(1.5)
    after = flow.decode(z, "sequential").x
    assert (after - before).abs().max() > 1e-3
    flow.blocks[0].net.layers[0].up.weight.data.div_(1.5)  # leaves no trace in the tensor's version
    torch.testing.assert_close(flow.decode(z, "sequential").x, before, atol=1e-4, rtol=1e-4)
    for copied in (copy.deepcopy(flow), pickle.loads(pickle.dumps(flow))):
        torch.testing.assert_close(copied.decode(z, "sequential").x, before, atol=1e-4, rtol=1e-4)


def test_gradients_go_through_torch() -> None:
    flow = made()
    x = flow.sample(2, seed=0).x
    flow.log_prob(x).sum().backward()
    assert flow.blocks[0].net.layers[0].up.weight.grad is not None


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As in a process that has not looked for the library yet, with an empty cache folder."""
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "kept"))
    monkeypatch.delenv("JACOBIFLOW_NATIVE", raising=False)
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    return tmp_path


def test_it_is_built_once(fresh: Path) -> None:
    assert native.library() is not None
    (built,) = (fresh / "kept/native").iterdir()
    made = built.stat().st_mtime_ns
    assert native.library() is not None
    assert [(p, p.stat().st_mtime_ns) for p in (fresh / "kept/native").iterdir()] == [(built, made)]


@pytest.mark.parametrize("damage", ["empty", "torn", "flipped", "foreign"])
def test_a_damaged_one_is_built_again(fresh: Path, damage: str) -> None:
    assert native.library() is not None
    (built,) = (fresh / "kept/native").iterdir()
    whole = built.read_bytes()
    middle = len(whole) // 2
    built.unlink()  # this process has it mapped
    built.write_bytes(
        {
            "empty": b"",
            "torn": whole[:middle],
            "flipped": whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :],
            "foreign": b"not a library",
        }[damage]
    )
    assert native.library() is not None
    assert [p.name for p in (fresh / "kept/native").iterdir()] == [built.name]
    assert native._whole(built.read_bytes())


GUARDED = """
import ctypes, mmap
import torch
from subjects import tarflow
from jacobiflow.flows import native_transformer

native_transformer.threads = lambda: 7
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
    block = flow.blocks[0].bind(None)
    cache = block.new_cache(n)
    block.params(x, 0, 3, cache)
    got = block.params(x, 3, t, cache)
    want = block.params(x.clone(), 3, t)
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
    kind, name = (tarflow.NativeNet, "__init__") if family == "tarflow" else (MaskedMLP, "_pack")
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


def test_without_a_compiler(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    assert native.library() is None
    assert not list((fresh / "kept/native").iterdir())
    monkeypatch.setenv("CC", str(fresh / "nothing"))
    assert native.library() is None


def test_switched_off(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACOBIFLOW_NATIVE", "0")
    assert native.library() is None


def test_no_folder_to_keep_it_in(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (fresh / "kept").write_text("a file")
    monkeypatch.setenv("TMPDIR", str(fresh))
    monkeypatch.setattr("tempfile.tempdir", None)
    with pytest.warns(UserWarning, match="nothing is kept between runs"):
        assert native.library() is not None
    assert [path.name for path in fresh.iterdir()] == ["kept"]  # the private folder is gone
