"""Sampling on and on takes no more memory than sampling once.

JACOBIFLOW_SOAK=1800 makes it half an hour, and batches larger.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import soak


@pytest.mark.slow
def test_memory_is_flat() -> None:
    seconds = float(os.environ.get("JACOBIFLOW_SOAK", "8"))
    batch = 64 if seconds > 60 else 4
    ran = subprocess.run(
        [sys.executable, soak.__file__, str(seconds), str(batch)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200 + 10 * seconds,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    print(found)
    assert max(found["after"]) < 1.05 * found["warm-up"]
