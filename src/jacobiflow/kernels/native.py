"""The C functions of `kernels`, built by the machine's compiler on first use, kept in the cache folder.

Nothing depends on it: where there is no compiler, or JACOBIFLOW_NATIVE=0, torch does the work.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes import c_char_p, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from jacobiflow.core.cache_folder import own_folder, read_own, warn_once, write_own
from jacobiflow.core.types import Status

KERNELS = Path(__file__).with_name("csrc")
SOURCES = ("transformer.c", "masked.c", "bands.c", "spline.c", "elementwise.c", "checksum.c", "accept.c")
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")
PANEL = 16  # as in vector.h
SMALL = 1 << 18  # numbers for which a second thread of torch's does not pay


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None, and one warning, where they cannot be had."""
    if os.environ.get("JACOBIFLOW_NATIVE") == "0" or os.name != "posix":
        return None
    try:
        compiler = _compiler()
        if not compiler:
            _warn("no C compiler was found")
            return None
        name = _name(compiler)
        return _declare(_load(_built(compiler, name), name))
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        _warn(f"they could not be built: {_reason(error)}")
        return None


def _warn(reason: str) -> None:
    warn_once(
        f"the C kernels are not used ({reason}), so decoding runs in torch, several times slower: "
        "install a C compiler or set CC, or set JACOBIFLOW_NATIVE=0 to silence this"
    )


def _reason(error: Exception) -> str:
    """One line; of a failed compiler the first that it says about an error."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line.strip() for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
        return f"{error.cmd[0]} failed, {said}"
    return " ".join(str(error).split())


def version() -> str:
    """What names the compiled functions in use; "torch" where there are none."""
    return "torch" if library() is None else _name(_compiler())


def _compiler() -> tuple[str, ...]:
    """The compiler and its arguments, from CC or as it is found; () if there is none."""
    own = tuple(shlex.split(os.environ.get("CC", "")))
    found = (shutil.which(name) for name in ("cc", "gcc", "clang"))
    return own or tuple(path for path in found if path)[:1]


def _name(compiler: tuple[str, ...]) -> str:
    """The same for the same source, compiler and processor."""
    key = hashlib.sha256(" ".join((*compiler, _processor(), *FLAGS)).encode())
    for path in sorted(KERNELS.iterdir()):
        key.update(path.read_bytes())
    return f"kernels-{key.hexdigest()[:16]}"


def _built(compiler: tuple[str, ...], name: str) -> bytes:
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


def _build(compiler: tuple[str, ...], out: Path) -> bytes:
    sources = [str(KERNELS / name) for name in SOURCES]
    command = [*compiler, *FLAGS, *sources, "-o", str(out), "-lm", "-lpthread"]
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
    if c_long.in_dll(lib, "jf_panel").value != PANEL:
        raise RuntimeError("the C kernels pack weights in other panels: set PANEL as in vector.h")
    if tuple((c_long * 2).in_dll(lib, "jf_ranks")) != (Status.CONVERGED.rank, Status.SWEEP_LIMIT.rank):
        raise RuntimeError("the C kernels have other ranks of Status: set them as in core/types.py")
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


def map_codes() -> dict[tuple[str, int], int]:
    """The code of each elementwise map that the library has, by its name and count of numbers."""
    lib = library()
    return {} if lib is None else _codes(lib)[0]


def activation_codes() -> dict[str, int]:
    """The code of each activation that the library has, by its name."""
    lib = library()
    return {} if lib is None else _codes(lib)[1]


@cache
def _codes(lib: ctypes.CDLL) -> tuple[dict[tuple[str, int], int], dict[str, int]]:
    maps = [word.split(":") for word in lib.jf_codes().decode().split()]
    names = lib.jf_activations().decode().split()
    by_map = {(name, int(count)): code for code, (name, count) in enumerate(maps)}
    return by_map, {name: code for code, name in enumerate(names)}


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
