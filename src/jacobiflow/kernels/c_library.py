"""The C functions as Python calls them: their signatures, and weights in the layout that they read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from ctypes import c_char_p, c_float, c_int, c_int64, c_long, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow.core.results import Status

PANEL = 16  # columns per panel of packed weights, as in vector.h

# Result and arguments of each function: P is a pointer, L a long, I an int, F a float, S a text, - nothing.
KINDS = {"P": c_void_p, "L": c_long, "I": c_int, "F": c_float, "S": c_char_p, "-": None}
SIGNATURES = {
    "jf_codes": "S",
    "jf_activations": "S",
    "jf_params_scratch": "L PPP LL I",  # net, rows, starts; whether each row has its own, width; threads
    "jf_params": "I PPP LL PP I",  # the same, with theta and scratch
    "jf_solve_scratch": "L PP LL P I",  # net, rows; start, stop; z; threads
    "jf_solve": "I PP LL PL PL I P I",  # the same, with rows of z, slope and its rows; map; scratch
    "jf_masked": "- PLL PLL PL PP PL P I",  # net, n, stored; window; x; nodes, active; context; theta
    "jf_masked_solve": "I PLL LL PL PL PL PP PL IP I",  # lo, hi; x, z, slope, each with its rows; map
    "jf_large_pages": "- PL",  # fresh memory, its bytes
    "jf_affine": "- IF LLL PL P PP",  # map; n, w, d; z; theta; x, slope
    "jf_accept": "- PPP PLLL PP I",  # rows, rule, found; window, width of the batch; new, log_slope; cached
    "jf_checksums_begin": "- PLP I P",  # pieces, how many, sums; threads; job
    "jf_checksums_end": "- P",
}


def declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    """Set the signatures of all functions; raises if constants differ between Python and C."""
    if c_long.in_dll(lib, "jf_panel").value != PANEL:
        raise RuntimeError("the C kernels pack weights in other panels: set PANEL as in vector.h")
    if tuple((c_long * 2).in_dll(lib, "jf_ranks")) != (Status.CONVERGED.rank, Status.SWEEP_LIMIT.rank):
        raise RuntimeError("the C kernels have other ranks of Status: set them as in core/results.py")
    for name, signature in SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, *function.argtypes = (KINDS[kind] for kind in signature.replace(" ", ""))
    return lib


def structure(text: str) -> type[ctypes.Structure]:
    """A C structure: kinds, each followed by the names of its fields; Q is four numbers.

    >>> numbers = structure("L n length P x")(2, 3)
    >>> numbers.n, numbers.length, numbers.x
    (2, 3, None)
    """
    found, kind, kinds = list[tuple[str, Any]](), None, {**KINDS, "Q": c_int64 * 4}
    for word in text.split():
        if word in kinds:
            kind = kinds[word]
        else:
            found.append((word, kind))
    return type("Structure", (ctypes.Structure,), {"_fields_": found})


@cache
def codes_of(lib: ctypes.CDLL) -> tuple[dict[str, int], dict[str, int]]:
    """The codes of elementwise maps, by "name:count of numbers", and of activations, by name."""
    maps, activations = ((function().decode().split()) for function in (lib.jf_codes, lib.jf_activations))
    return {name: code for code, name in enumerate(maps)}, {name: code for code, name in enumerate(activations)}


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


class TensorPins(list[Tensor]):
    """Tensors whose addresses C holds: they live as long as this object."""

    def __call__(self, t: Tensor) -> int:
        """The address of t, made contiguous."""
        self.append(t.detach().contiguous())
        return self[-1].data_ptr()


def readable(tensors: Iterable[Tensor]) -> bool:
    """Whether C may read the numbers where they lie: float32 on a CPU, outside of autocast.

    A subclass of Tensor may mean other numbers.
    """
    return not torch.is_autocast_enabled("cpu") and all(
        type(t) in (Tensor, nn.Parameter) and t.layout == torch.strided and t.is_cpu and t.dtype == torch.float32
        for t in tensors
    )


def in_rows(t: Tensor) -> Tensor:
    """[n, T] or [n, T, D] in float32 with each row in one piece; rows may be apart."""
    if t.dtype != torch.float32:  # its bytes would be read as other numbers
        raise ValueError(f"x is {t.dtype}, the network {torch.float32}: cast one of them")
    step = 1 if t.ndim == 2 else t.shape[2]
    return t if t.stride(-1) == 1 and t.stride(1) == step else t.contiguous()
