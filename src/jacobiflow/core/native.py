"""The C functions of `kernels`, built by the machine's compiler on first use, kept in the cache folder.

Nothing depends on it: where there is no compiler, or JACOBIFLOW_NATIVE=0, torch does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from jacobiflow.core.cache_folder import own_folder, read_own, write_own

KERNELS = Path(__file__).with_name("kernels")
SOURCES = ("transformer.c", "masked.c", "bands.c", "spline.c", "elementwise.c", "checksum.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
SMALL = 1 << 18  # numbers for which a second thread of torch's does not pay
PANEL = 16  # as in vector.h


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where they cannot be had."""
    compiler = _compiler()
    if compiler is None:
        return None
    try:
        name = _name(compiler)
        return _declare(_load(_built(compiler, name), name))
    except (OSError, AttributeError, subprocess.SubprocessError):
        return None


def version() -> str:
    """What names the compiled functions in use; "torch" where there are none."""
    compiler = _compiler()
    return "torch" if compiler is None or library() is None else _name(compiler)


def _compiler() -> str | None:
    if os.environ.get("JACOBIFLOW_NATIVE") == "0" or os.name != "posix":
        return None
    return os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _name(compiler: str) -> str:
    """The same for the same source, compiler and processor."""
    key = hashlib.sha256(" ".join((compiler, _processor(), *FLAGS)).encode())
    for path in sorted(KERNELS.iterdir()):
        key.update(path.read_bytes())
    return f"kernels-{key.hexdigest()[:16]}"


def _built(compiler: str, name: str) -> bytes:
    """The shared object from the cache folder; built if it is not there, whole and the user's own."""
    folder = own_folder("native")
    if folder is not None:
        with suppress(OSError):
            content = read_own(folder / f"{name}.so")
            if _whole(content):
                return content
    with tempfile.TemporaryDirectory(prefix="jacobiflow-") as room:
        content = _build(compiler, Path(room) / name)
    if folder is not None:
        with suppress(OSError):  # built again next time
            write_own(folder / f"{name}.so", content)
    return content


def _build(compiler: str, out: Path) -> bytes:
    sources = [str(KERNELS / name) for name in SOURCES]
    command = [compiler, *FLAGS, *sources, "-o", str(out), "-lm", "-lpthread"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    content = out.read_bytes()
    return content + hashlib.sha256(content).digest()  # loaders do not mind what follows the last section


def _whole(content: bytes) -> bool:
    """Whether the file is as it was built: a torn one may end the process that loads it."""
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _load(content: bytes, name: str) -> ctypes.CDLL:
    """The library from a copy of this process's own: what was checked is what is loaded, and a file that is
    cut short later does not end the process (SIGBUS).
    """
    with suppress(AttributeError, OSError):  # Linux only; hardened kernels may refuse
        number = os.memfd_create(name)  # stays open: the loader takes an equal path for the same library
        with open(number, "wb", closefd=False) as file:
            file.write(content)
        return ctypes.CDLL(f"/proc/self/fd/{number}")
    with tempfile.TemporaryDirectory(prefix="jacobiflow-", ignore_cleanup_errors=True) as room:
        path = Path(room) / f"{name}.so"
        path.write_bytes(content)
        return ctypes.CDLL(str(path))  # stays loaded without the file


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
    lib.jf_solve_scratch.restype = c_long
    lib.jf_solve_scratch.argtypes = [c_void_p, c_long, c_int]
    lib.jf_solve.restype = c_int
    lib.jf_solve.argtypes = [
        *(c_void_p, c_long, c_long, c_long),  # net, n, lo, hi
        *(c_void_p, c_long, c_void_p, c_long, c_void_p, c_long),  # x, z, slope, each with its rows
        *(c_void_p, c_long),  # condition
        *(c_void_p, c_void_p, c_long, c_float),  # keys, values, stride of a layer, scale
        *(c_void_p, c_int),  # scratch, threads
    ]
    lib.jf_masked.restype = None
    lib.jf_masked.argtypes = [
        *(c_void_p, c_long, c_long, c_long, c_long, c_long),  # net, n, first, upto, lo, hi
        *(c_void_p, c_long, c_void_p, c_void_p, c_void_p, c_long),  # x, nodes, active, context
        *(c_void_p, c_int),  # theta, threads
    ]
    lib.jf_masked_solve.restype = c_int
    lib.jf_masked_solve.argtypes = [
        *(c_void_p, c_long, c_long, c_long, c_long),  # net, n, first, lo, hi
        *(c_void_p, c_long, c_void_p, c_long, c_void_p, c_long),  # x, z, slope, each with its rows
        *(c_void_p, c_void_p, c_void_p, c_long),  # nodes, active, context
        *(c_int, c_void_p, c_int),  # kind, its numbers, threads
    ]
    lib.jf_affine.restype = lib.jf_compare.restype = None
    lib.jf_affine.argtypes = [
        *(c_int, c_float, c_long, c_long, c_long),  # kind, eps, n, w, d
        *(c_void_p, c_long, c_void_p, c_void_p, c_void_p),  # z, theta, x, slope
    ]
    lib.jf_compare.argtypes = [
        *(c_long, c_long, c_long),  # n, w, d
        *(c_void_p, c_void_p, c_long),  # now, before
        *(c_void_p, c_long, c_void_p, c_float),  # z, log_slope, rounding
        *(c_void_p, c_void_p),  # update, still
    ]
    lib.jf_checksums_begin.restype = lib.jf_checksums_end.restype = None
    lib.jf_checksums_begin.argtypes = [
        *(c_void_p, c_long, c_void_p, c_int, c_void_p),  # pieces, how many, sums, threads, job
    ]
    lib.jf_checksums_end.argtypes = [c_void_p]
    return lib


def usable(like: Tensor) -> ctypes.CDLL | None:
    """The library, where it applies: plain numbers on a CPU, no gradients, no autocast."""
    if torch.is_grad_enabled() or like.device.type != "cpu" or like.dtype != torch.float32:
        return None
    return None if torch.is_autocast_enabled("cpu") else library()


def pad(t: Tensor) -> Tensor:
    """The last dimension with zeros up to a whole number of panels."""
    return nn.functional.pad(t, (0, -t.shape[-1] % PANEL))


def panels(weight: Tensor) -> Tensor:
    """[in, out] as [panels, in, 16], padded with zeros."""
    return pad(weight).reshape(len(weight), -1, PANEL).transpose(0, 1)


AFFINE = {"exp": 0, "softplus": 1, "sigmoid": 2}  # as in elementwise.c
SOFTCLIP, CLAMPED, STABLE, SPLINE, CLIPPED_SPLINE = range(3, 8)  # as in masked.h


def affine_inverse(scale: str, eps: float, z: Tensor, theta: Tensor) -> tuple[Tensor, Tensor] | None:
    """x and log |dx/dz| of an affine map [n, w, d], theta [n, w, 2 d]; None where there is no library."""
    lib = usable(z)
    if lib is None or z.ndim != 3 or theta.shape != (*z.shape[:2], 2 * z.shape[2]) or theta.dtype != z.dtype:
        return None
    n, w, d = z.shape
    z, theta = _rows(z), theta.contiguous()
    x, slope = (z.new_empty(n, w, d) for _ in range(2))
    ends = x.data_ptr(), slope.data_ptr()
    lib.jf_affine(AFFINE[scale], eps, n, w, d, z.data_ptr(), z.stride(0), theta.data_ptr(), *ends)
    return x, slope


def compare(
    new: Tensor, seen: Tensor, scale: tuple[Tensor, Tensor] | None, rounding: float
) -> tuple[Tensor, Tensor] | None:
    """As `jacobiflow.core.stopping.compare`; None where the library does not apply.

    scale: z and log |dx/dz|, for changes in the relative unit.
    """
    lib = usable(new)
    if lib is None:
        return None
    n, w, d = new.shape
    new, seen = new.contiguous(), _rows(seen)
    update, still = new.new_empty(n), new.new_empty(n, dtype=torch.long)
    unit: tuple[int, int, int] = (0, 0, 0)
    if scale is not None:
        z, log_slope = _rows(scale[0]), scale[1].contiguous()  # named, so that they live through the call
        unit = z.data_ptr(), z.stride(0), log_slope.data_ptr()
    ends = update.data_ptr(), still.data_ptr()
    lib.jf_compare(n, w, d, new.data_ptr(), seen.data_ptr(), seen.stride(0), *unit, rounding, *ends)
    return update, still


def _rows(t: Tensor) -> Tensor:
    """Each row [w, d] in one piece; rows may be apart."""
    return t if t.stride(2) == 1 and t.stride(1) == t.shape[2] else t.contiguous()


class _Threads(threading.local):
    count: int | None = None


_threads = _Threads()


def threads() -> int:
    """How many threads a compiled function may use."""
    return _threads.count or torch.get_num_threads()


@contextmanager
def alone(like: Tensor) -> Iterator[None]:
    """Small work: torch's operators on one thread. Its other threads wait for work by spinning, and would
    take the processor from those of the compiled functions, which keep their number.
    """
    count, pool = torch.get_num_threads(), openmp()
    if count == 1 or pool is None or like.numel() > SMALL or usable(like) is None:
        yield
        return
    pool.omp_set_num_threads(1)
    _threads.count, before = count, _threads.count
    try:
        yield
    finally:
        _threads.count = before
        pool.omp_set_num_threads(count)


@cache
def openmp() -> ctypes.CDLL | None:
    """The thread pool of torch's operators, if it can be found.

    Its setting is the calling thread's own. `torch.set_num_threads` would also set what every thread
    that is born meanwhile takes for good.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    found = {line.split(maxsplit=5)[5] for line in maps if "omp" in line.rpartition("/")[2]}
    pools = [path for path in found if Path(path).name.startswith(("libgomp", "libiomp", "libomp"))]
    torch_own = str(Path(torch.__file__).parent)
    for path in sorted(pools, key=lambda p: not p.startswith(torch_own)):
        try:
            pool = ctypes.CDLL(path)
            pool.omp_set_num_threads.argtypes, pool.omp_set_num_threads.restype = [c_int], None
        except (OSError, AttributeError):
            continue
        if _is_torchs(pool):
            return pool
    return None


def _is_torchs(pool: ctypes.CDLL) -> bool:
    count = torch.get_num_threads()
    pool.omp_set_num_threads(count + 1)
    found = torch.get_num_threads() == count + 1
    pool.omp_set_num_threads(count)
    return found


class Kept:
    """Tensors whose addresses were given away: they live as long as this does."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def __call__(self, t: Tensor) -> int:
        """The address of t, made contiguous."""
        self.tensors.append(t.detach().contiguous())
        return self.tensors[-1].data_ptr()
