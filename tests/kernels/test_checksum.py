"""Checksums see every bit of a tensor, whatever its type and layout, compiled or not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from jacobiflow.kernels import build
from jacobiflow.kernels.checksum import PIECE, Memory, Running


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(build, "library", lambda: None)
    else:
        assert build.library() is not None, "these tests need a C compiler: CC, cc, gcc or clang"
    return request.param


def sums(*groups: list[Tensor]) -> list[object]:
    return Memory(groups).sums()


def swapped(t: Tensor, i: int, j: int) -> None:
    t[[i, j]] = t[[j, i]]


def moved(t: Tensor, up: int, down: int) -> None:
    t[up] += 1
    t[down] -= 1


def flipped(*places: int) -> Callable[[Tensor], None]:
    def flip(t: Tensor) -> None:
        t[list(places)] = -t[list(places)]

    return flip


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "one element": lambda t: t.__setitem__(17, 4.0),
    "the last place of one": lambda t: t.view(torch.int32)[999].add_(1),
    "not a number": lambda t: t.__setitem__(999, math.nan),
    "the sign of zero": lambda t: t.__setitem__(5, -0.0),
    "two exchanged": lambda t: swapped(t, 100, 101),
    "two exchanged, far": lambda t: swapped(t, 3, 3 + 512),
    "a sum of zero": lambda t: moved(t, 10, 20),
    "a sum of zero in bits": lambda t: moved(t.view(torch.int32), 64, 128),
    "all signs": lambda t: t.neg_(),
    "shifted": lambda t: t.copy_(t.roll(1)),
    **{f"two signs, {d} apart": flipped(301, 301 + d) for d in (1, 2, 4, 16, 32, 64, 128, 256)},
    **{f"three signs, {d} apart": flipped(301, 300 + d, 301 + d) for d in (2, 4, 16, 32, 64, 128, 256)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_shows(name: str) -> None:
    t = torch.randn(1003, generator=torch.Generator().manual_seed(0))
    t[5] = 0.0
    before = sums([t])
    assert sums([t.clone()]) == sums([t]) == before
    kept = t.clone()
    CHANGES[name](t)
    assert not torch.equal(t.view(torch.int32), kept.view(torch.int32))
    assert sums([t]) != before
    t.copy_(kept)
    assert sums([t]) == before


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn),
        *(torch.uint8, torch.int16, torch.int64, torch.bool),
    ],
    ids=str,
)
def test_every_byte_counts(dtype: torch.dtype) -> None:
    t = torch.zeros(301, dtype=torch.float32).to(dtype)
    raw, before = t.view(torch.uint8), sums([t])
    seen = {repr(before)}
    for i in range(len(raw)):
        raw[i] = 1
        seen.add(repr(sums([t])))
        raw[i] = 0
    assert len(seen) == 1 + len(raw)
    assert sums([t]) == before


@pytest.mark.parametrize("size", [0, 1, 7, 8, 255, 256, 257, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 5])
def test_every_size(size: int) -> None:
    t = torch.zeros(size + 3, dtype=torch.uint8)[3:]  # from an odd address
    before = sums([t])
    for i in {0, size // 2, size - 1} if size else ():
        t[i] = 255
        assert sums([t]) != before
        t[i] = 0
    assert sums([t]) == before
    assert sums([torch.zeros(size + 1, dtype=torch.uint8)]) != before


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.T,
    "permuted": lambda t: t.view(4, 10, 30).permute(1, 2, 0),
    "columns": lambda t: t[:, ::3],
    "a corner": lambda t: t[5:20, 7:20],
    "one number": lambda t: t[3, 4],
    "expanded": lambda t: t[:, :1].expand(-1, 5),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name: str) -> None:
    whole = torch.randn(40, 30)
    t = LAYOUTS[name](whole)
    before = sums([t])
    assert sums([t]) == before
    old = whole.clone()
    for place in range(whole.numel()):
        whole.view(-1)[place] += 1
        assert (sums([t]) == before) == torch.equal(t, LAYOUTS[name](old))
        whole.copy_(old)


def test_what_the_bytes_mean_counts() -> None:
    t = torch.randn(6, 6)
    assert len({repr(sums([one])) for one in (t, t.T, t.view(4, 9), t.view(torch.int32))}) == 4
    assert sums([t, t]) != sums([t])


def test_groups_are_apart() -> None:
    a, b, c = torch.randn(3, 500).unbind()
    whole = sums([a, b], [], [c])
    assert whole == [*sums([a, b]), *sums([]), *sums([c])]
    c[3] += 1
    assert [x == y for x, y in zip(sums([a, b], [], [c]), whole, strict=True)] == [True, True, False]


@pytest.mark.parametrize("threads", [0, 1, 3, 50])
def test_threads_change_nothing(threads: int) -> None:
    t = torch.randn(PIECE)
    memory = Memory([[t, t[:7]]])
    with Running(memory, threads) as running:
        assert running.end() == memory.sums()


def test_memory_lives_while_it_is_read() -> None:
    t = torch.nn.Parameter(torch.zeros(8 * PIECE))
    memory = Memory([[t]])
    before = memory.sums()
    running = Running(memory, 1)
    t.data = torch.ones(3)  # nobody else has the numbers now
    assert running.end() == before
    Running(memory, 1)  # dropped: its threads are waited for
