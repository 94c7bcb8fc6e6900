"""Convert a checkpoint of the public TarFlow code, load the result, and sample it.

python examples/convert_tarflow.py mnist_model_4_128_4_4_0.1.pth 1

The arguments are the file and the number of colour channels of its images (default: 3).
"""

import sys
from pathlib import Path

import torch

import jacobiflow as jf

if len(sys.argv) not in (2, 3):
    raise SystemExit(__doc__)
path, channels = Path(sys.argv[1]), int([*sys.argv, "3"][2])
flow = jf.import_tarflow(path, image_channels=channels)  # pass noise_std= if the name lacks it
print(flow.config)
flow.save("converted")
again = jf.load("converted")
z = flow.noise(2, seed=0)
assert torch.equal(flow.decode(z, "sequential").x, again.decode(z, "sequential").x)
out = again.decode(again.noise(2, seed=0), "selective", check=True)
print("samples", list(out.x.shape), "residual", out.stats.residual.max().item())
