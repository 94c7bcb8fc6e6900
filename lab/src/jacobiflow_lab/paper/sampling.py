"""The decoders that are compared, and samples by them as pictures."""

from __future__ import annotations

import torch
from torch import Tensor

from jacobiflow.core.method import Method, Plan
from jacobiflow.core.pictures import as_images
from jacobiflow_lab.metrics import as_pixels
from jacobiflow_lab.metrics.samples import Sampling
from jacobiflow_lab.paper.session import Task

TAU = 0.5  # the paper's tolerance
PAPER_METHODS = ("sequential", "uniform", "selective")
NOISE, PREVIOUS = "selective, from noise", "selective, from input"  # the other first guesses of Figure 6
GUESSES = ("selective", NOISE, PREVIOUS)  # the paper's, which starts from zeros, first
CALIBRATED, WINDOWS, AUTO = "selective, calibrated", "sliding windows", "auto"
BEYOND = (CALIBRATED, WINDOWS, AUTO)  # not in the paper
METHODS = (*PAPER_METHODS, PREVIOUS, *BEYOND)  # whose samples are scored and shown
WINDOW = Method(width=16, tol=1e-3)  # slides along the first block of WINDOWS
SAMPLES_AT_ONCE = 64  # decoded and denoised per batch, where nothing is timed


def plan_for(task: Task, method: str, batch: int) -> Plan | None:
    """The plan of a method; "tau 0.1" is selective decoding at that tau. None: the model has none.

    Uniform and selective decoding start from zeros, as the paper's algorithm does. "auto" is chosen for this
    machine and batch size.
    """
    flow, tau = task.flow, task.scale.tau
    if method == "sequential":
        return flow.plan(method)
    if method == AUTO:
        return flow.plan("auto", n=batch)
    if method == WINDOWS:
        return Plan((WINDOW, *flow.plan("selective", tol=tau).methods[1:]))
    if method == CALIBRATED:
        return None if flow.guesses() is None else flow.plan("selective", tol=tau, init="calibrated")
    if method.startswith("tau "):
        return flow.plan("selective", tol=float(method[4:]), init="zeros")
    if method in (NOISE, PREVIOUS):
        return task.plan("selective", "noise" if method == NOISE else "previous")
    return task.plan(method)


def all_plans(task: Task, batch: int, methods: tuple[str, ...] = METHODS) -> dict[str, Plan]:
    """The plans of these methods that the model has."""
    found = {method: plan_for(task, method, batch) for method in methods}
    return {method: plan for method, plan in found.items() if plan is not None}


def draw(task: Task, plan: Plan, n: int) -> Tensor:
    """n samples as denoised images [n, C, H, W] in [-1, 1]; some may not be finite.

    Sample i has the same noise and label under every plan.
    """
    guidance = task.session.annealed_guidance
    sampling = Sampling(flow=task.flow, plan=plan, guidance=guidance, seed=task.seed)
    starts = range(0, n, SAMPLES_AT_ONCE)
    return torch.cat([sampling(start, min(SAMPLES_AT_ONCE, n - start)) for start in starts])


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
