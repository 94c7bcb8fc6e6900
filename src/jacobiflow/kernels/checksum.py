"""Checksums over every byte of some tensors, by the compiled function; elsewhere by torch, with one host read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_uint64, c_void_p
from functools import cache
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jacobiflow.kernels import build
from jacobiflow.kernels.threads import thread_count

PIECE = 1 << 18  # bytes of one sum in C, or in torch on a CPU: they stay in its cache
LAUNCH = 1 << 24  # bytes of one sum on another device
LARGE = 1 << 26  # bytes that are worth another thread while the caller waits
SMALL = 4 << 20  # bytes that are read about as soon as a thread is started
ODD = -7046029254386353131, -4417276706812531889  # as signed 64-bit numbers

Sums = tuple[Any, ...]  # layout and checksums of a group of tensors
_Piece = build.structure("P start L bytes")


def layout(t: Tensor) -> tuple[Any, ...]:
    """What the bytes of a tensor mean."""
    return t.dtype, t.shape, t.stride(), t.device


class Memory:
    """The memory of groups of tensors, kept alive, and its checksums."""

    def __init__(self, groups: Iterable[Iterable[Tensor]]) -> None:
        self.lib, self.ends = build.library(), list[int]()
        self.tensors = [[t.detach() for t in group] for group in groups]
        self.layouts = [tuple(map(layout, group)) for group in self.tensors]
        self.others: dict[tuple[int, torch.device], list[Tensor]] = {}  # that torch reads, by group and device
        pieces = list[ctypes.Structure]()
        for i, group in enumerate(self.tensors):
            for t in group:
                flat = _flat(t) if self.lib is not None and t.is_cpu else None
                if flat is None or flat.untyped_storage().data_ptr() != t.untyped_storage().data_ptr():
                    self.others.setdefault((i, t.device), []).append(t)
                else:
                    start, size = flat.data_ptr(), len(flat)
                    pieces += [_Piece(start + at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
            self.ends.append(len(pieces))
        self.pieces = (_Piece * len(pieces))(*pieces)
        self.bytes = sum(piece.bytes for piece in pieces)

    @property
    def apart(self) -> bool:
        """Whether sums are better computed beside other work than before it."""
        return any(device.type != "cpu" for _, device in self.others) or (self.bytes > SMALL and thread_count() > 1)

    def sums(self) -> list[Sums]:
        """The sums of each group now."""
        return Running(self, min(thread_count() - 1, self.bytes // LARGE)).end()


class Running:
    """Sums that are being computed, those of the compiled function on `threads` threads."""

    def __init__(self, memory: Memory, threads: int) -> None:
        self.memory = memory
        self.job = c_void_p()  # set and cleared by C alone: an interrupt cannot part the two
        self.found = (c_uint64 * len(memory.pieces))()
        with torch.no_grad():
            others = [_torch_sum(tensors) for tensors in memory.others.values()]
            self.others = torch.stack([one.to(others[0].device) for one in others]) if others else torch.empty(0)
        if memory.lib is not None:
            job = ctypes.byref(self.job)
            memory.lib.jf_checksums_begin(memory.pieces, len(self.found), self.found, threads, job)
            if not self.job:
                raise MemoryError("no memory for the checksums of the weights: free some")

    def end(self) -> list[Sums]:
        """The sums of each group. The calling thread helps with what is left."""
        self._join()
        ends = pairwise((0, *self.memory.ends))
        done = [(own, *self.found[a:b]) for own, (a, b) in zip(self.memory.layouts, ends, strict=True)]
        for (i, _), number in zip(self.memory.others, self.others.tolist(), strict=True):
            done[i] += (number,)
        return done

    def _join(self, *_: object) -> None:
        if self.job and self.memory.lib is not None:
            self.memory.lib.jf_checksums_end(ctypes.byref(self.job))

    def __enter__(self) -> Running:
        return self

    __exit__ = __del__ = _join  # its threads read memory that is kept alive here, and write into it


def _flat(t: Tensor) -> Tensor:
    """The bytes of a tensor in the order of memory; a copy if they have gaps."""
    return t.permute(sorted(range(t.ndim), key=t.stride, reverse=True)).contiguous().view(-1).view(torch.uint8)


def _torch_sum(tensors: Sequence[Tensor]) -> Tensor:
    """A checksum of tensors on one device: sums of words, each mixed with its place by a bijection."""
    size = PIECE if tensors[0].is_cpu else LAUNCH
    places = _places(tensors[0].device, size // 4)  # a batch is less than two pieces
    pieces = [piece for t in tensors for piece in torch.split(_flat(t), size)]
    total, ends = places.new_zeros(()), accumulate(len(piece) + -len(piece) % 8 for piece in pieces)
    for _, batch in groupby(zip(ends, pieces, strict=True), lambda pair: pair[0] // size):
        words = torch.cat([F.pad(piece, (0, -len(piece) % 8)) for _, piece in batch]).view(torch.int64)
        words ^= places[: len(words)]
        for odd, shift in zip(ODD, (29, 32), strict=True):
            words.mul_(odd)
            words ^= words >> shift
        total = total * ODD[0] + words.sum()
    return total


@cache
def _places(device: torch.device, count: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(1, count + 1, device=device) * ODD[0]
