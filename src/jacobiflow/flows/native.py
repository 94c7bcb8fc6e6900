"""`transformer.c`, built by the machine's C compiler on first use and kept in the user's cache folder.

Nothing depends on it: where there is no compiler, or JACOBIFLOW_NATIVE=0, torch does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jacobiflow.core.folders import cache_folder

SOURCE = Path(__file__).with_name("transformer.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-Wno-psabi")
PANEL = 16  # as in the source


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where they cannot be had."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if os.environ.get("JACOBIFLOW_NATIVE") == "0" or compiler is None or os.name != "posix":
        return None
    try:
        return _declare(ctypes.CDLL(str(_built(compiler))))
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None


def _built(compiler: str) -> Path:
    """The shared object for this source, compiler and processor; built if it is not there yet."""
    key = (SOURCE.read_bytes(), compiler.encode(), _processor().encode(), *(f.encode() for f in FLAGS))
    name = f"transformer-{hashlib.sha256(b'|'.join(key)).hexdigest()[:16]}.so"
    try:
        folder = cache_folder() / "native"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if (folder / name).exists():
            return folder / name
        with tempfile.TemporaryDirectory(dir=folder) as room:
            return _build(compiler, Path(room) / name).rename(folder / name)
    except OSError:  # no folder to keep it in: a build for this process
        return _build(compiler, Path(tempfile.mkdtemp(prefix="jacobiflow-")) / name)


def _build(compiler: str, out: Path) -> Path:
    command = [compiler, *FLAGS, str(SOURCE), "-o", str(out), "-lm", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return out


def _processor() -> str:
    """What decides which instructions there are: a folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {flags}"


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    lib.jf_scratch.restype = c_long
    lib.jf_scratch.argtypes = [c_void_p, c_long, c_long, c_int]
    lib.jf_params.restype = c_int
    lib.jf_params.argtypes = [
        *(c_void_p, c_long, c_long, c_long, c_long),  # net, n, first, need, last
        *(c_void_p, c_long, c_void_p, c_long),  # x, condition
        *(c_void_p, c_void_p, c_long, c_float),  # keys, values, stride of a layer, scale
        *(c_void_p, c_long, c_void_p, c_int),  # theta, scratch, threads
    ]
    return lib


class _Layer(ctypes.Structure):
    _fields_ = [
        (name, c_void_p)
        for name in ("qkv", "qkv_bias", "proj", "proj_bias", "up", "up_bias", "down", "down_bias")
    ]


class _Net(ctypes.Structure):
    _fields_ = [
        *((n, c_long) for n in ("length", "dim", "width", "heads", "head_dim", "hidden", "depth", "params")),
        *((name, c_void_p) for name in ("input", "embed", "output", "output_bias", "layers")),
    ]


@dataclass
class NativeCache:
    """Keys and values [layers, n, heads, T, head_dim], the last padded, and room to work in."""

    net: NativeNet
    k: Tensor
    v: Tensor
    scratch: Tensor
    valid: int = 0

    def select(self, rows: Tensor) -> NativeCache:
        """These rows in a cache of their own; only the valid part is copied."""
        shape = list(self.k.shape)
        shape[1] = len(rows)
        k, v = self.k.new_empty(shape), self.v.new_empty(shape)
        if self.valid:
            k[..., : self.valid, :] = self.k[:, rows, :, : self.valid]
            v[..., : self.valid, :] = self.v[:, rows, :, : self.valid]
        return NativeCache(self.net, k, v, self.scratch, self.valid)


class NativeNet:
    """The weights of a `PatchBlock` as the compiled functions take them."""

    def __init__(self, lib: ctypes.CDLL, block: Any) -> None:
        self.lib = lib
        self.kept: list[Tensor] = []
        net = block.net
        heads, head_dim = net.width // net.head_dim, net.head_dim
        self.layers = (_Layer * len(net.layers))(*(self._layer(w, heads, head_dim) for w in net.layers))
        self.shape = (len(net.layers), heads, net.length, _padded(head_dim))
        self.params, self.head_dim = block.proj_out.out_features, head_dim
        self.net = _Net(
            *(net.length, block.proj_in.in_features, net.width, heads, head_dim),
            *(net.layers[0].up.out_features, len(net.layers), self.params),
            self._keep(_panels(block.proj_in.weight.T)),
            self._keep(block.pos_embed + block.proj_in.bias),
            *self._linear(block.proj_out.weight.T, block.proj_out.bias),
            ctypes.cast(self.layers, c_void_p),
        )
        self.address = ctypes.addressof(self.net)

    def _layer(self, w: Any, heads: int, head_dim: int) -> _Layer:
        """Norms' scales and shifts folded into the matrices behind them, heads padded."""
        qkv, up = w.qkv.weight * w.norm1.weight, w.up.weight * w.norm2.weight
        qkv_bias = w.qkv.bias + w.qkv.weight @ w.norm1.bias
        up_bias = w.up.bias + w.up.weight @ w.norm2.bias
        proj = _pad_heads(w.proj.weight.view(-1, heads, head_dim)).flatten(1)
        columns = _pad_heads(qkv.T.reshape(-1, 3 * heads, head_dim)).flatten(1)
        return _Layer(
            *self._linear(columns, _pad_heads(qkv_bias.view(3 * heads, head_dim)).flatten()),
            *self._linear(proj.T, w.proj.bias),
            *self._linear(up.T, up_bias),
            *self._linear(w.down.weight.T, w.down.bias),
        )

    def _linear(self, weight: Tensor, bias: Tensor) -> tuple[int, int]:
        return self._keep(_panels(weight)), self._keep(nn.functional.pad(bias, (0, -len(bias) % PANEL)))

    def _keep(self, t: Tensor) -> int:
        self.kept.append(t.detach().contiguous())
        return self.kept[-1].data_ptr()

    def new_cache(self, n: int, *, layers: int | None = None) -> NativeCache:
        """An empty cache for n rows."""
        depth, *rest = self.shape
        k = torch.empty(depth if layers is None else layers, n, *rest)
        return NativeCache(self, k, torch.empty_like(k), torch.empty(0))

    def __call__(
        self,
        x: Tensor,
        lo: int,
        hi: int,
        condition: Tensor | None,
        temperature: float,
        cache: NativeCache | None,
    ) -> Tensor:
        """theta [n, hi - lo, P]; as `Block.params`."""
        n, need = len(x), max(lo - 1, 0)
        theta = x.new_empty(n, hi - lo, self.params)
        if lo == 0:
            theta[:, 0] = 0  # nothing stands before the first position: identity
        if hi == 1 or not n:
            return theta
        kept = cache is not None
        room = cache if cache is not None else self.new_cache(n, layers=1)
        first, threads = min(room.valid, need), torch.get_num_threads()
        if x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            x = x.contiguous()
        while True:
            size = self.lib.jf_scratch(self.address, n, hi - 1 - first, threads)
            if len(room.scratch) < size:
                room.scratch = torch.empty(size)
            failed = self.lib.jf_params(
                *(self.address, n, first, need, hi - 1, x.data_ptr(), x.stride(0)),
                0 if condition is None else condition.data_ptr(),
                0 if condition is None or len(condition) == 1 else condition.stride(0),
                *(room.k.data_ptr(), room.v.data_ptr(), room.k.stride(0) if kept else 0),
                1.0 / (math.sqrt(self.head_dim) * temperature),
                *(theta.data_ptr() + (lo == 0) * 4 * self.params, theta.stride(0)),
                *(room.scratch.data_ptr(), threads),
            )
            if not failed:
                break
            threads = 1  # the system gave no more
        room.valid = hi - 1
        return theta


def _padded(n: int) -> int:
    return n + -n % PANEL


def _pad_heads(t: Tensor) -> Tensor:
    """[..., head_dim] with zeros up to a whole number of panels."""
    return nn.functional.pad(t, (0, -t.shape[-1] % PANEL))


def _panels(weight: Tensor) -> Tensor:
    """[in, out] as [panels, in, 16], padded with zeros."""
    depth = len(weight)
    return _pad_heads(weight).reshape(depth, -1, PANEL).transpose(0, 1)
