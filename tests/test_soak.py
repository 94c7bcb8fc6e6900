"""Working on and on takes no more memory, threads or files than working once.

`python tests/soak.py 1800 64` is the same for half an hour and larger batches.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

import soak

SECONDS, BATCH = 60, 4


@pytest.mark.slow
def test_memory_is_flat() -> None:
    ran = subprocess.run(
        [sys.executable, soak.__file__, str(SECONDS), str(BATCH)],
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    print(found)
    assert found["draws"] > 20
    assert max(found["growth"].values()) < 0.05
