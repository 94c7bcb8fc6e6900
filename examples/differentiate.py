"""Gradients through samples: find noise whose digit is as dark as possible and still likely.

Gradients use the implicit function theorem, so no sweep is kept in memory.

    python examples/differentiate.py
"""

import torch

import jacobiflow as jf

flow = jf.load("mnist").requires_grad_(False)
z = flow.noise(1, seed=0).requires_grad_()
optimizer = torch.optim.Adam([z], lr=0.05)
for step in range(8):
    out = flow.decode(z, labels=3, differentiable=True)
    ink = (out.x + 1).mean()
    loss = ink + 1e-4 * z.square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: ink {ink.item():.4f}, gradient {z.grad.norm():.2g}")
