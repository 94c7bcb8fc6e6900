"""Builds the C kernels by the machine's compiler on first use, and keeps them in the cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from ctypes import c_char_p, c_float, c_int, c_int64, c_long, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

from jacobiflow.core.files import own_folder, read_own, write_own
from jacobiflow.core.hardware import processor_facts
from jacobiflow.core.progress import announce
from jacobiflow.core.results import Status, one_line, warn_once

PANEL = 16  # columns per panel of packed weights, as in vector.h
KERNELS = Path(__file__).with_name("csrc")
SOURCES = sorted(KERNELS.glob("*.c"))
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared", "-fno-math-errno", "-Wno-psabi")

# Result and arguments of each function: P is a pointer, L a long, I an int, F a float, S a text, - nothing.
KINDS = {"P": c_void_p, "L": c_long, "I": c_int, "F": c_float, "S": c_char_p, "-": None, "Q": c_int64 * 4}
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
    "jf_map": "- IP LL PL P PP",  # map; n, params; z; theta; x, slope
    "jf_accept": "- P PLLL PP I",  # sweep; window, width of the batch; new, log_slope; cached
    "jf_checksums_begin": "- PLP I P",  # pieces, how many, sums; threads; job
    "jf_checksums_end": "- P",
}


@cache
def library() -> ctypes.CDLL | None:
    """The compiled functions; None, and one warning, where they cannot be had."""
    if os.environ.get("JACOBIFLOW_NATIVE") == "0" or os.name != "posix":
        return None
    reason = "no C compiler was found"
    try:
        if compiler := compiler_command():
            name = _name(compiler)
            return declare(_load(_built(compiler, name), name))
    except subprocess.CalledProcessError as error:
        said = [line.strip() for line in error.stderr.decode(errors="replace").splitlines() if line.strip()]
        first = [*(line for line in said if "error" in line), *said, "no message"][0]
        reason = f"they could not be built: {error.cmd[0]} failed, {first}"
    except (OSError, AttributeError, ValueError, subprocess.SubprocessError) as error:
        reason = f"they could not be built: {one_line(error)}"
    advice = "install a C compiler or set CC, or set JACOBIFLOW_NATIVE=0 to silence this"
    warn_once(f"the C kernels are not used ({reason}), so decoding runs in torch, several times slower: {advice}")
    return None


def version() -> str:
    """What names the compiled functions in use; "torch" where there are none."""
    return "torch" if library() is None else _name(compiler_command())


def compiler_command() -> tuple[str, ...]:
    """The compiler and its arguments, from CC or as it is found; () if there is none."""
    found = (shutil.which(name) for name in ("cc", "gcc", "clang"))
    return tuple(shlex.split(os.environ.get("CC", ""))) or tuple(path for path in found if path)[:1]


def _name(compiler: tuple[str, ...]) -> str:
    """The same for the same source, compiler and processor: a folder may be shared by several machines."""
    processor = platform.machine(), platform.processor(), processor_facts("flags", "Features")
    key = hashlib.sha256(" ".join((*compiler, *processor, *FLAGS)).encode())
    for path in sorted(KERNELS.iterdir()):
        key.update(path.read_bytes())
    return f"kernels-{key.hexdigest()[:16]}"


def _built(compiler: tuple[str, ...], name: str) -> bytes:
    """The shared object from the cache folder; built if it is not there, whole and the user's own."""
    if (folder := own_folder("native")) is not None:
        with suppress(OSError):
            content = read_own(folder / f"{name}.so")
            if hashlib.sha256(content[:-32]).digest() == content[-32:]:  # a torn one may end this process
                return content
    announce("compiling the C kernels, once: this takes about ten seconds")
    with tempfile.TemporaryDirectory(prefix="jacobiflow-") as room:
        command = [*compiler, *FLAGS, *map(str, SOURCES), "-o", f"{room}/{name}", "-lm", "-lpthread"]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
        content = Path(room, name).read_bytes()
    content += hashlib.sha256(content).digest()  # loaders do not mind what follows the last section
    if folder is not None:
        with suppress(OSError):  # built again next time
            write_own(folder / f"{name}.so", content)
    return content


def _load(content: bytes, name: str) -> ctypes.CDLL:
    """The library from a copy of this process's own: what was checked is loaded, and stays whole (else SIGBUS)."""
    with suppress(AttributeError, OSError):  # Linux only; hardened kernels may refuse
        number = os.memfd_create(name)  # stays open: the loader takes an equal path for the same library
        with open(number, "wb", closefd=False) as file:
            file.write(content)
        return ctypes.CDLL(f"/proc/self/fd/{number}")
    with tempfile.TemporaryDirectory(prefix="jacobiflow-", ignore_cleanup_errors=True) as room:
        path = Path(room) / f"{name}.so"
        path.write_bytes(content)
        return ctypes.CDLL(str(path))  # stays loaded without the file


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
    """A C structure: kinds, each followed by the names of its fields, as in "L n length P x"; Q is four numbers."""
    found, kind = list[tuple[str, Any]](), None
    for word in text.split():
        if word in KINDS:
            kind = KINDS[word]
        else:
            found.append((word, kind))
    return type("Structure", (ctypes.Structure,), {"_fields_": found})
