"""`jacobiflow doctor`."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import textwrap
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from jacobiflow import __version__
from jacobiflow.cli.options import Json, parse, report
from jacobiflow.core.files import own_folder, write_own
from jacobiflow.core.hardware import BILLION, available_cores, processor_name, total_memory
from jacobiflow.core.progress import steps
from jacobiflow.core.results import one_line
from jacobiflow.core.tables import counted, listing, pip_install, terminal_width
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.maf import MAF, MAFConfig
from jacobiflow.flows.tarflow import TarFlow, TarFlowConfig
from jacobiflow.kernels import build

OURS = ("jacobiflow-models", "jacobiflow-lab")  # distributions that must have the library's version
OTHERS = ("torch", "numpy", "safetensors", "tyro", "pillow")
LARGEST_DEVIATION = 1e-3  # of float32 samples of order 1 on different devices; rounding is about 1e-6


@dataclass(frozen=True)
class Args:
    """Check this installation, and say what to do if something is wrong.

    Prints versions, devices, compiler, threads and the cache folder. Decodes two
    small flows on every device and compares the samples with those of the CPU.
    Include the output in bug reports. The exit status is 1 if there are problems.

    example: jacobiflow doctor
    """

    json: Json = False


Finding = tuple[str, Any]  # the text of a row, and its facts for programs


def main(argv: Sequence[str]) -> int:
    """Run the command; a warning of the form "what is wrong: what to do" is a problem, and the exit status then 1."""
    args = parse(Args, argv, command="doctor")
    checks: dict[str, Callable[[], Finding]] = {"versions": versions, "system": system, "threads": threads}
    checks |= {"cache": cache_use, "compiler": compiler, "kernels": kernels}
    checks |= {str(device): partial(self_check, device) for device in devices()}
    found: dict[str, Finding] = {}
    with warnings.catch_warnings(record=True) as caught, steps("checking") as show_step:
        warnings.simplefilter("always")
        for name, check in checks.items():
            show_step(name)
            found[name] = check()
    problems = list(dict.fromkeys(" ".join(str(w.message).split()) for w in caught))
    text = listing((name, without_home(text)) for name, (text, _) in found.items()) + "\n\n"
    text += f"{counted(len(problems), 'problem')}:" if problems else "all good"
    fill = partial(textwrap.fill, width=terminal_width(), break_on_hyphens=False)
    for problem in problems:
        text += "\n" + fill(without_home(problem), initial_indent="  - ", subsequent_indent="    ")
    doc = {name: facts for name, (_, facts) in found.items()} | {"problems": problems}
    report(json.loads(without_home(json.dumps(doc))), text, as_json=args.json)
    return int(bool(problems))


def without_home(text: str) -> str:
    """The text with ~ for the home folder, which often has the user's name in it."""
    home = os.path.expanduser("~")
    return re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if len(home) > 1 else text


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None


def versions() -> Finding:
    """Our distributions, which belong together, and those that we need."""
    facts = {"jacobiflow": __version__} | {name: installed(name) for name in OURS}
    facts |= {"Python": platform.python_version()} | {name: installed(name) for name in OTHERS}
    wrong = [name.removeprefix("jacobiflow-") for name in OURS if facts[name] not in (None, __version__)]
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in facts.items())
    if wrong:
        warnings.warn(f"the versions differ: {pip_install(*wrong)}", stacklevel=1)
    return text, facts


def system() -> Finding:
    """The operating system, the memory and where the library is."""
    name, memory, package = platform.platform(), total_memory(), str(Path(__file__).parents[1])
    text = f"{name}, {memory / BILLION:,.0f} GB of memory, jacobiflow in {package}"
    return text, {"platform": name, "memory": memory, "package": package}


def threads() -> Finding:
    """Threads of torch and of the C kernels, beside the cores that they can run on."""
    count, cores, asked = torch.get_num_threads(), available_cores(), os.environ.get("OMP_NUM_THREADS")
    text = f"{count} on {cores} cores" + ("" if asked is None else f", OMP_NUM_THREADS={asked}")
    if asked is not None and not re.fullmatch(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*", asked):
        warnings.warn(f"OMP_NUM_THREADS={asked!r} is not a whole number above 0: set it to {cores}", stacklevel=1)
    elif (most := max(count, int((asked or "1").partition(",")[0]))) > cores:
        wrong = f"there are more threads than cores ({most} on {cores})"
        warnings.warn(f"{wrong}: set OMP_NUM_THREADS={cores}", stacklevel=1)
    return text, {"count": count, "cores": cores, "OMP_NUM_THREADS": asked}


def cache_use() -> Finding:
    """The cache folder, whether it can be written to, and what is stored there."""
    folder = own_folder("costs")
    if folder is None:  # a warning says why
        return "not used", None
    cache = folder.parent
    probe = folder / f"doctor-{os.getpid()}"
    try:
        write_own(probe, b"")
        probe.unlink()
    except OSError as error:
        wrong = f"the cache folder {cache} cannot be written to ({error.strerror})"
        warnings.warn(f"{wrong}: set JACOBIFLOW_CACHE to a folder of your own", stacklevel=1)
    counts = {part.name: sum(1 for f in part.rglob("*") if f.is_file()) for part in sorted(cache.iterdir())}
    stored = ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"
    return f"{cache}, stored files: {stored}", {"folder": str(cache), "stored": counts}


def compiler() -> Finding:
    """The C compiler, as it names itself; `kernels` reports if it is missing."""
    try:
        command = build.compiler_command()
        if not command:
            return "none", None
        said = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"does not run ({one_line(error)})", None
    name = said.stdout.partition("\n")[0].strip()
    return f"{' '.join(command)}: {name}", {"command": command, "version": name}


def kernels() -> Finding:
    """The C kernels, built if they are not there; a warning says why they cannot be used."""
    if os.environ.get("JACOBIFLOW_NATIVE") == "0":
        return "off, because JACOBIFLOW_NATIVE=0", None
    in_use = None if build.library() is None else build.version()
    return in_use or "not used: torch does their work", in_use


def devices() -> list[torch.device]:
    """The CPU and every accelerator that torch sees."""
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    others = (torch.device(f"{torch.accelerator.current_accelerator()}:{i}") for i in range(count))
    return [torch.device("cpu"), *others]


def self_check(device: torch.device) -> Finding:
    """Decode on the device, and compare with sequential decoding by torch on the CPU."""
    facts: dict[str, Any] = {"processor": None, "backend": None, "deviation": None}
    try:
        facts["processor"] = processor_name(device)
        backends, deviations = zip(*(deviation_on(device, flow) for flow in small_flows()), strict=True)
    except (RuntimeError, AssertionError, ValueError) as error:  # device types raise different errors
        wrong = f"decoding on {device} fails ({one_line(error)[:200]})"
        warnings.warn(f"{wrong}: update its driver and torch", stacklevel=1)
        return f"{facts['processor']}: fails", facts
    facts |= {"backend": " + ".join(sorted(set(backends))), "deviation": float(torch.stack(deviations).max())}
    if not facts["deviation"] <= LARGEST_DEVIATION:
        wrong = f"samples of {device} with backend {facts['backend']} deviate by {facts['deviation']:.1g}"
        warnings.warn(f"{wrong}: use --backend torch or another device, and report this", stacklevel=1)
    return "{processor}, backend {backend}, self-check deviates by {deviation:.1g}".format(**facts), facts


def deviation_on(device: torch.device, flow: Flow) -> tuple[str, torch.Tensor]:
    """The backend that the flow has on the device, and the largest deviation of its samples there."""
    z = flow.noise(4, seed=0)
    exact = flow.decode(z, "sequential", backend="torch").x
    there = deepcopy(flow).to(device)
    plans = (there.plan("sequential"), there.plan("uniform", tol=1e-6))
    outs = [there.decode(z.to(device), plan, warn=False) for plan in plans]
    return outs[0].stats.backend, torch.stack([(out.x.cpu() - exact).abs().max() for out in outs]).max()


def small_flows() -> list[Flow]:
    """A TarFlow and a MAF with random weights, the same on every machine."""
    shape = partial(TarFlowConfig, image_size=8, image_channels=1, patch_size=2, width=32, head_dim=16)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        tarflow = TarFlow(shape(blocks=2, layers_per_block=2))
        maf = MAF(MAFConfig(features=16, blocks=2, hidden=(32, 32)))
        for p in (*tarflow.parameters(), *maf.parameters()):  # some begin at zero
            p.add_(torch.randn_like(p), alpha=0.2 / p.shape[-1] ** 0.5)
    return [tarflow, maf]
