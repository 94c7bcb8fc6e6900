"""Checksums over every byte of some tensors: of any dtype, layout and device, beside other work if wanted.

On a CPU the compiled function reads them at the speed of memory. Elsewhere, and where there is no compiler,
torch computes the sums, with few launches and one host read per device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from ctypes import c_long, c_uint64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

from jacobiflow.kernels import build
from jacobiflow.kernels.threads import thread_count

PIECE = 1 << 18  # bytes of one sum in C, or in torch on a CPU: they stay in its cache
LAUNCH = 1 << 24  # bytes of one sum on another device
LARGE = 1 << 26  # bytes that are worth another thread while the caller waits
SMALL = 4 << 20  # bytes that are read about as soon as a thread is started
ODD = -7046029254386353131, -4417276706812531889  # as signed 64-bit numbers

Sums = tuple[Any, ...]  # layout and checksums of a group of tensors


class _Piece(ctypes.Structure):
    _fields_ = [("start", c_void_p), ("bytes", c_long)]


def layout(t: Tensor) -> tuple[Any, ...]:
    """What the bytes of a tensor mean."""
    return t.dtype, t.shape, t.stride(), t.device


class Memory:
    """The memory of groups of tensors, kept alive, and its checksums."""

    def __init__(self, groups: Iterable[Iterable[Tensor]]) -> None:
        self.lib = build.library()
        self.groups = [_Group(tensors, compiled=self.lib is not None) for tensors in groups]
        pieces = [piece for group in self.groups for piece in group.pieces]
        self.pieces = (_Piece * len(pieces))(*(_Piece(*piece) for piece in pieces))
        self.bytes = sum(size for _, size in pieces)

    @property
    def apart(self) -> bool:
        """Whether sums are better computed beside other work than before it."""
        away = any(device.type != "cpu" for group in self.groups for device in group.others)
        return away or (self.bytes > SMALL and thread_count() > 1)

    def sums(self) -> list[Sums]:
        """The sums of each group now."""
        with Running(self, min(thread_count() - 1, self.bytes // LARGE)) as running:
            return running.end()


class _Group:
    """Tensors whose sums are compared together."""

    def __init__(self, tensors: Iterable[Tensor], *, compiled: bool) -> None:
        self.tensors = [t.detach() for t in tensors]
        self.layout = tuple(map(layout, self.tensors))
        self.pieces: list[tuple[int, int]] = []  # address and bytes
        self.others: dict[torch.device, list[Tensor]] = {}  # torch reads these
        for t in self.tensors:
            flat = _flat(t) if compiled and t.is_cpu else None
            if flat is None or flat.untyped_storage().data_ptr() != t.untyped_storage().data_ptr():
                self.others.setdefault(t.device, []).append(t)
            else:
                start, size = flat.data_ptr(), len(flat)
                self.pieces += [(start + i, min(PIECE, size - i)) for i in range(0, size, PIECE)]


class Running:
    """Sums that are being computed, those of the compiled function on `threads` threads."""

    def __init__(self, memory: Memory, threads: int) -> None:
        self.memory = memory
        self.job = c_void_p()  # set and cleared by C alone: an interrupt cannot part the two
        self.found = (c_uint64 * len(memory.pieces))()
        with torch.no_grad():
            self.others = [[_torch_sums(found) for found in g.others.values()] for g in memory.groups]
        if memory.lib is not None:
            count, job = len(self.found), ctypes.byref(self.job)
            memory.lib.jf_checksums_begin(memory.pieces, count, self.found, threads, job)
            if not self.job:
                raise MemoryError("no memory for the checksums of the weights: free some")

    def end(self) -> list[Sums]:
        """The sums of each group. The calling thread helps with what is left."""
        self._join()
        done, first = [], 0
        read = _read([sums for group in self.others for sums in group])
        for group, others in zip(self.memory.groups, self.others, strict=True):
            last = first + len(group.pieces)
            done.append((group.layout, tuple(self.found[first:last]), *(next(read) for _ in others)))
            first = last
        return done

    def _join(self) -> None:
        if self.job and self.memory.lib is not None:
            self.memory.lib.jf_checksums_end(ctypes.byref(self.job))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        self._join()  # its threads read memory that is kept alive here, and write into it

    __del__ = _join


def _flat(t: Tensor) -> Tensor:
    """The bytes of a tensor in the order of memory; a copy if they have gaps."""
    order = sorted(range(t.ndim), key=t.stride, reverse=True)
    return t.permute(order).contiguous().view(-1).view(torch.uint8)


def _torch_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Checksums [k] of tensors on one device: sums of words, each mixed with its place by a bijection."""
    size = PIECE if tensors[0].is_cpu else LAUNCH
    batches, room = [list[Tensor]()], size
    for t in tensors:
        for piece in torch.split(_flat(t), size):
            if len(piece) > room:
                batches.append([])
                room = size
            batches[-1] += [piece, piece.new_zeros(-len(piece) % 8)]
            room -= len(piece) + -len(piece) % 8
    places = _places(tensors[0].device, size // 8)
    return torch.stack([_torch_sum(torch.cat(batch).view(torch.int64), places) for batch in batches])


def _torch_sum(words: Tensor, places: Tensor) -> Tensor:
    words = words ^ places[: len(words)]
    for odd, shift in zip(ODD, (29, 32), strict=True):
        words.mul_(odd)
        words ^= words >> shift
    return words.sum()


@cache
def _places(device: torch.device, count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, count + 1, device=device) * ODD[0]


def _read(sums: Sequence[Tensor]) -> Iterator[tuple[int, ...]]:
    """The numbers of each, with one host read per device."""
    found: dict[int, tuple[int, ...]] = {}
    for device in {t.device for t in sums}:
        mine = [i for i, t in enumerate(sums) if t.device == device]
        numbers = iter(torch.cat([sums[i] for i in mine]).tolist())
        found |= {i: tuple(next(numbers) for _ in range(len(sums[i]))) for i in mine}
    return iter([found[i] for i in range(len(sums))])
