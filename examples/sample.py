"""Draw digits by sequential decoding and by sweeps, compare them, and save a grid of each.

python examples/sample.py
"""

import torch

import jacobiflow as jf
from jacobiflow.data.pictures import as_images, save_grid

flow = jf.load("mnist")
labels = torch.arange(10).repeat(2)
z = flow.noise(len(labels), seed=0)
exact = flow.decode(z, "sequential", labels=labels)
for plan in ("sequential", "uniform", "selective"):
    out = flow.decode(z, plan, labels=labels, check=True)
    sweeps = " ".join(f"{block.sweeps.float().mean():.1f}" for block in out.stats.blocks)
    deviation = (out.x - exact.x).abs().max()
    print(f"{plan:10}  {out.stats.seconds:.2f} s  sweeps {sweeps}")
    print(f"{'':10}  largest deviation {deviation:.2g}, residual {out.stats.residual.max():.2g}")
    save_grid(as_images(out.x), f"{plan}.png", columns=10)
