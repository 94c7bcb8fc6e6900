"""Standard normal noise whose rows do not depend on their batch."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

Noise = Literal["gaussian", "dequantize", "binary", "none"]  # see `data.transforms.prepare`


def row_noise(
    n: int, shape: tuple[int, ...], seed: int | None, start: int = 0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Rows start .. start + n - 1 of the noise, [n, *shape]. Row i depends on (seed, i) only.

    >>> bool((row_noise(3, (2,), 0)[1:] == row_noise(2, (2,), 0, start=1)).all())
    True
    """
    key = np.random.SeedSequence(seed).generate_state(1, np.uint64)[0]
    rows = np.empty((n, *shape))
    for i in range(n):
        bits = np.random.Philox(key=np.array([key, start + i], dtype=np.uint64))
        np.random.Generator(bits).standard_normal(out=rows[i])
    return rows
