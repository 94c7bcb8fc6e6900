"""`make bench`: our speed against peers, and what accelerating other libraries brings.

`make bench ARGS="mnist_quality --data mnist.npz"`: that one. Tables are printed and written into out/.
"""

from __future__ import annotations

import runpy
import sys

NAMES = ("speed", "auto", "accelerate", "ising", "mnist_quality")


def main() -> None:
    chosen, rest = [a for a in sys.argv[1:] if a in NAMES], [a for a in sys.argv[1:] if a not in NAMES]
    for name in chosen or NAMES[:2]:
        sys.argv = [name, *rest]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")


if __name__ == "__main__":
    main()
