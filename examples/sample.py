"""Draw digits by sequential decoding and by sweeps, compare them, and save a grid of each.

python examples/sample.py
"""

import torch

import jacobiflow as jf

flow = jf.load("mnist")
labels = torch.arange(10).repeat(2)
z = flow.noise(len(labels), seed=0)
exact = flow.decode(z, "sequential", labels=labels)
for plan in ("sequential", "uniform", "selective"):
    out = flow.decode(z, plan, labels=labels, check=True)
    print(f"{plan}: largest deviation {(out.x - exact.x).abs().max():.2g}")
    print(out.stats.summary())
    out.save(f"{plan}.png", columns=10)
