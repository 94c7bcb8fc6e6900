"""Accelerate an sbi posterior with one line, and check that its samples stay the same.

python examples/accelerate_sbi.py
"""

import time

import torch
from sbi.inference import NPE

import jacobiflow as jf

torch.manual_seed(0)
size = 32
prior = torch.distributions.MultivariateNormal(torch.zeros(size), torch.eye(size))
theta = prior.sample((500,))
trainer = NPE(prior, "maf", show_progress_bars=False)
trainer.append_simulations(theta, theta + torch.randn(500, size))
posterior = trainer.build_posterior(trainer.train(stop_after_epochs=2))


def draw() -> tuple[torch.Tensor, float]:
    """Draw the same samples each time; also return the seconds."""
    torch.manual_seed(1)
    began = time.perf_counter()
    x = posterior.sample((2000,), x=torch.zeros(size), show_progress_bars=False)
    return x, time.perf_counter() - began


before, slow = draw()
jf.accelerate(posterior)
after, fast = draw()
print(f"{slow:.2f} s before, {fast:.2f} s after: {slow / fast:.0f}x")
print(f"largest difference {(after - before).abs().max():.1g}")
print(jf.acceleration(posterior))
assert torch.allclose(after, before, atol=1e-4)
