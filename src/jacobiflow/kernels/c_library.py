"""The C functions as Python calls them: their signatures, and weights in the layout that they read."""

from __future__ import annotations

import ctypes
from ctypes import c_char_p, c_float, c_int, c_long, c_void_p
from functools import cache

import torch
from torch import Tensor, nn

from jacobiflow.core.results import Status

PANEL = 16  # columns per panel of packed weights, as in vector.h


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Set the signatures of all functions; raises if constants differ between Python and C."""
    if c_long.in_dll(lib, "jf_panel").value != PANEL:
        raise RuntimeError("the C kernels pack weights in other panels: set PANEL as in vector.h")
    if tuple((c_long * 2).in_dll(lib, "jf_ranks")) != (Status.CONVERGED.rank, Status.SWEEP_LIMIT.rank):
        raise RuntimeError("the C kernels have other ranks of Status: set them as in core/results.py")
    lib.jf_codes.restype = lib.jf_activations.restype = c_char_p
    lib.jf_params_scratch.restype = lib.jf_solve_scratch.restype = c_long
    lib.jf_params_scratch.argtypes = [*(c_void_p, c_void_p, c_void_p, c_long, c_long), c_int]
    lib.jf_params.restype = lib.jf_solve.restype = c_int
    lib.jf_params.argtypes = [
        *(c_void_p, c_void_p, c_void_p, c_long, c_long),  # net, rows, starts, start, width
        *(c_void_p, c_void_p, c_int),  # theta, scratch, threads
    ]
    lib.jf_solve_scratch.argtypes = [*(c_void_p, c_void_p, c_long, c_long), c_void_p, c_int]
    lib.jf_solve.argtypes = [
        *(c_void_p, c_void_p, c_long, c_long),  # net, rows, start, stop
        *(c_void_p, c_long, c_void_p, c_long),  # z, slope, each with its rows
        *(c_int, c_void_p, c_int),  # map, scratch, threads
    ]
    lib.jf_masked.restype = None
    lib.jf_masked.argtypes = [
        *(c_void_p, c_long, c_long, c_long, c_void_p, c_long),  # net, n, stored, start, starts, width
        *(c_void_p, c_long, c_void_p, c_void_p, c_void_p, c_long),  # x, nodes, active, context
        *(c_void_p, c_int),  # theta, threads
    ]
    lib.jf_masked_solve.restype = c_int
    lib.jf_masked_solve.argtypes = [
        *(c_void_p, c_long, c_long, c_long, c_long),  # net, n, stored, lo, hi
        *(c_void_p, c_long, c_void_p, c_long, c_void_p, c_long),  # x, z, slope, each with its rows
        *(c_void_p, c_void_p, c_void_p, c_long),  # nodes, active, context
        *(c_int, c_void_p, c_int),  # kind, its numbers, threads
    ]
    lib.jf_affine.restype = None
    lib.jf_affine.argtypes = [
        *(c_int, c_float, c_long, c_long, c_long),  # kind, eps, n, w, d
        *(c_void_p, c_long, c_void_p, c_void_p, c_void_p),  # z, theta, x, slope
    ]
    lib.jf_accept.restype = None
    lib.jf_accept.argtypes = [
        *(c_void_p, c_void_p, c_void_p),  # rows, rule, found
        *(c_void_p, c_long, c_long, c_long),  # starts, start, width of the window, width of the batch
        *(c_void_p, c_void_p, c_int),  # new, log_slope, cached
    ]
    lib.jf_checksums_begin.restype = lib.jf_checksums_end.restype = None
    lib.jf_checksums_begin.argtypes = [
        *(c_void_p, c_long, c_void_p, c_int, c_void_p),  # pieces, how many, sums, threads, job
    ]
    lib.jf_checksums_end.argtypes = [c_void_p]
    return lib


@cache
def codes_of(lib: ctypes.CDLL) -> tuple[dict[tuple[str, int], int], dict[str, int]]:
    """The codes of elementwise maps, by name and count of numbers, and of activations, by name."""
    maps = [word.split(":") for word in lib.jf_codes().decode().split()]
    names = lib.jf_activations().decode().split()
    by_map = {(name, int(count)): code for code, (name, count) in enumerate(maps)}
    return by_map, {name: code for code, name in enumerate(names)}


def pad(t: Tensor) -> Tensor:
    """The last dimension with zeros up to a whole number of panels."""
    return nn.functional.pad(t, (0, -t.shape[-1] % PANEL))


def panels(weight: Tensor) -> Tensor:
    """[in, out] as [panels, in, 16], padded with zeros."""
    return pad(weight).reshape(len(weight), -1, PANEL).transpose(0, 1)


def panels_of_pairs(weight: Tensor) -> Tensor:
    """[in, out] as [panels, in / 2, 16], two neighbours along `in` in bfloat16 per number."""
    rows = pad(weight.T).T.to(torch.bfloat16)
    pairs = pad(rows).reshape(len(rows) // 2, 2, -1, PANEL).permute(2, 0, 3, 1)
    return pairs.contiguous().view(torch.float32)[..., 0]


class TensorPins:
    """Tensors whose addresses C holds: they live as long as this object."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, t: Tensor) -> int:
        """The address of t, made contiguous."""
        self.tensors.append(t.detach().contiguous())
        return self.tensors[-1].data_ptr()
