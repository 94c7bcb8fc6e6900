"""Every way to decode on another device, with all tensors where they belong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_decoding_on_another_device_is_decoding_on_the_cpu() -> None:
    """Five plans per subject. A tensor left on the CPU is an error there."""
    names = ["tarflow-guided", "tarflow-shift", "tarflow-labels", "maf-context", "nsf"]
    folder = Path(__file__).parent
    ran = subprocess.run(
        [sys.executable, folder / "pretend_device.py", *names],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])},
    )
    assert ran.returncode == 0, ran.stderr
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert [line[0] for line in lines if line[1] != "plain"] == [name for name in names for _ in range(5)]
    assert [line[0] for line in lines if line[1] == "plain"] == ["tarflow-labels"]
    assert all(float(line[2]) < 1e-9 for line in lines), ran.stdout
