"""The decoders that are compared, and samples by them as pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from jacobiflow.core.method import Method, Plan
from jacobiflow.core.pictures import as_images
from jacobiflow_lab.metrics import as_pixels
from jacobiflow_lab.paper.session import Task

TAU = 0.5  # the paper's tolerance
PREVIOUS = "selective, from input"  # the first guess is the block's input, our default
PAPER_METHODS = ("sequential", "uniform", "selective")
METHODS = (*PAPER_METHODS, PREVIOUS, "windowed", "auto")
WINDOW = Method(width=16, tol=0.01)  # of the first block of the windowed plan
SAMPLES_AT_ONCE = 64  # decoded and denoised per batch, where nothing is timed


def plan_for(task: Task, method: str, batch: int, *, tau: float | None = TAU) -> Plan:
    """The plan of one of METHODS; "auto" is chosen for this machine and batch size.

    Uniform and selective decoding start from zeros, as the paper's algorithm does.
    """
    flow = task.flow
    if method == "sequential":
        return flow.plan("sequential")
    if method == "windowed":
        return Plan((WINDOW, *flow.plan("selective", tol=tau).methods[1:]))
    if method == "auto":
        return flow.plan("auto", n=batch)
    if method == PREVIOUS:
        return flow.plan("selective", tol=tau, init="previous")
    return flow.plan(method, tol=tau, init="zeros")


def all_plans(task: Task, batch: int) -> dict[str, Plan]:
    """The plans of all METHODS at the paper's tolerance."""
    return {method: plan_for(task, method, batch) for method in METHODS}


def draw(task: Task, plan: Plan, n: int) -> Tensor:
    """n samples as uint8 images [n, C, H, W]. Sample i has the same noise and label under every plan."""
    starts = range(0, n, SAMPLES_AT_ONCE)
    return torch.cat([to_pixels(decode(task, plan, min(SAMPLES_AT_ONCE, n - i), start=i)) for i in starts])


def decode(task: Task, plan: Plan, n: int, *, seed: int | None = None, start: int = 0) -> Tensor:
    """Samples start, start + 1, ... as denoised images in [-1, 1], in one batch; some may not be finite."""
    labels = task.labels(n, start)
    z = task.flow.noise(n, task.seed if seed is None else seed, start=start)
    x = task.flow.decode(z, plan, labels=labels, guidance=task.session.annealed_guidance).x
    return denoise(task, x, labels)


def denoise(task: Task, x: Tensor, labels: Tensor | None) -> Tensor:
    """Samples as images [N, C, H, W] in [-1, 1], denoised if training added noise."""
    if getattr(task.flow.config, "noise_std", 0.0):
        x = task.flow.denoise(x, labels)
    images = as_images(x)
    assert images is not None, "only flows of images are sampled as pictures"
    return images


def to_pixels(x: Tensor) -> Tensor:
    """Images as uint8, black where they are not finite."""
    return as_pixels(x.nan_to_num(-1.0)).cpu()
