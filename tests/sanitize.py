"""Decodes the subjects of the laws with the C kernels, for `make sanitize` to watch.

Every subject in float32, at several widths and batch sizes, on one thread and on more than there are cores,
then from two Python threads at once. Prints how many settings ran in C; fails if results differ from torch's.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

import jacobiflow as jf
from subjects import NAMES, subject

WIDTHS = (1, 3, None)
BATCHES = (1, 5, 33)
THREADS = (1, 4)


def main() -> None:
    ran, total = 0, 0
    with ThreadPoolExecutor(2) as pool, torch.inference_mode():
        for name in NAMES:
            one = subject(name)
            flow = one.flow.float()
            for width, batch in ((w, n) for w in WIDTHS for n in BATCHES):
                plan = jf.Plan((jf.Method(width=width, tol=1e-4),) * len(flow.blocks))
                z = flow.noise(batch, seed=1)
                want = one.decode(z, plan, backend="torch", warn=False)
                found = []
                for threads in THREADS:
                    torch.set_num_threads(threads)
                    found.append(one.decode(z, plan, warn=False))
                found += pool.map(lambda x, o=one, p=plan: o.decode(x, p, warn=False), (z, z))
                for out in found:
                    torch.testing.assert_close(out.x, want.x, atol=1e-2, rtol=1e-2, equal_nan=True)
                ran += "c" in found[0].stats.backend.split(" + ")
                total += 1
    print(f"{ran} of {total} settings of {len(NAMES)} subjects ran in C")


if __name__ == "__main__":
    main()
