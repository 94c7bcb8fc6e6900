"""The decoders that are compared; their samples (Figures 3, A7, A8) and reconstructions (Figures A4 to A6)."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from jacobiflow.core.method import Method, Plan
from jacobiflow.core.pictures import save_strip
from jacobiflow_lab.analysis.plots import save_grids
from jacobiflow_lab.metrics import as_pixels
from jacobiflow_lab.metrics.reconstruction import errors, reconstructed, reconstruction
from jacobiflow_lab.metrics.samples import Sampling
from jacobiflow_lab.paper.schema import Item, Result
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
OTHER_SAMPLES = 24  # of each method that is not in the first picture
SHOWN_AGAIN = 12  # images in the picture of reconstructions


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


def to_pixels(x: Tensor) -> Tensor:
    """Images as uint8, black where they are not finite."""
    return as_pixels(x.nan_to_num(-1.0)).cpu()


def run_samples(task: Task) -> Result:
    """The same noise by every method, denoised as the paper's samples are."""
    n, batch = task.scale.shown, task.scale.batches[-1]
    images = {method: draw(task, plan, n) for method, plan in all_plans(task, batch, METHODS).items()}
    pixels = {method: to_pixels(x) for method, x in images.items()}
    pair = {method: pixels.pop(method) for method in ("sequential", "selective")}
    rest = {method: x[:OTHER_SAMPLES] for method, x in pixels.items()}
    both, others = (partial(save_grids, panels=shown, columns=8, across=2) for shown in (pair, rest))
    exact = images.pop("sequential")
    apart = {method: reconstruction(errors(exact, x)) for method, x in images.items()}
    rows = [{"method": m} | vars(found) | {"grey_levels": found.mean * 127.5} for m, found in apart.items()]
    same, options = f"{task.model}: the same noise by", {"restricted": task.restricted}
    pictures = (
        task.picture("samples", f"{same} both decoders.", partial(both, title=task.model), **options),
        task.picture("samples-more", f"{same} the other methods.", others, **options),
    )
    return Result(data={"tau": task.scale.tau, "rows": rows}, counts={"samples": n}, pictures=pictures)


def run_reconstruction(task: Task) -> Result:
    """Test images to noise and back by every method."""
    flow, test = task.flow, task.images[1]
    n = min(len(test), task.session.samples or task.scale.reconstructed)
    index = torch.linspace(0, len(test) - 1, n).long()
    rows, shown = {}, {}
    for method, plan in all_plans(task, task.scale.batches[-1]).items():
        off, pictures = [], []
        for some in torch.split(index, SAMPLES_AT_ONCE):
            x, again = reconstructed(flow, test, some, plan)
            off.append(errors(x, again))
            pictures.append(again)
        rows[method] = asdict(reconstruction(torch.cat(off)))
        shown[method] = torch.cat(pictures)[:SHOWN_AGAIN]
    original = test.pixels[index[:SHOWN_AGAIN]].float() / 127.5 - 1
    pairs = [("original", original), ("selective", shown["selective"].reshape(original.shape).cpu())]
    title = f"{task.model}: test images, and decoded from their noise at tau {TAU:g}"
    strips = partial(save_strip, pairs, title=title, shown=SHOWN_AGAIN)
    caption = f"{task.model}: originals above, reconstructions below."
    picture = task.picture("reconstruction", caption, strips, restricted=task.restricted)
    return Result(data={"tau": TAU, "rows": rows}, counts={"images": n}, pictures=(picture,))


SAMPLES = Item(name="samples", run=run_samples, minutes=lambda scale, model: 0.6)
RECONSTRUCTION = Item(name="reconstruction", run=run_reconstruction, noise=False, minutes=lambda scale, model: 0.6)
