"""Reconstruction of real images (Figures A4 to A6)."""

from __future__ import annotations

from dataclasses import asdict

import torch

from jacobiflow_lab.analysis.plots import save_rows
from jacobiflow_lab.metrics.reconstruction import errors, reconstruct, reconstruction
from jacobiflow_lab.paper.sampling import SAMPLES_AT_ONCE, TAU, all_plans
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task

SHOWN = 12  # images in the picture


def run(task: Task) -> Result:
    """Test images to noise and back by every method."""
    flow, test = task.flow, task.images[1]
    n = min(len(test), task.session.samples or task.scale.reconstructed)
    index = torch.linspace(0, len(test) - 1, n).long()
    rows, shown = {}, {}
    for method, plan in all_plans(task, task.scale.batches[-1]).items():
        off, pictures = [], []
        for some in torch.split(index, SAMPLES_AT_ONCE):
            x = (test.pixels[some].to(task.device).float() / 127.5 - 1).reshape(-1, *flow.data_shape)
            condition = {} if test.labels is None else {"labels": test.labels[some].to(task.device)}
            again = reconstruct(flow, x, plan, **condition)
            off.append(errors(x, again))
            pictures.append(again)
        rows[method] = asdict(reconstruction(torch.cat(off)))
        shown[method] = torch.cat(pictures)[:SHOWN]
    original = test.pixels[index[:SHOWN]].float() / 127.5 - 1
    path = task.picture("reconstruction")
    save_rows(
        [("original", original), ("selective", shown["selective"].reshape(original.shape).cpu())],
        path,
        title=f"{task.model}: test images, and decoded from their noise at tau {TAU:g}",
        shown=SHOWN,
    )
    caption = f"{task.model}: originals above, reconstructions below."
    return Result(
        data={"tau": TAU, "rows": rows}, counts={"images": n}, pictures=(Picture(path.name, caption, task.restricted),)
    )


ITEM = Item(name="reconstruction", run=run, noise=False, minutes=lambda scale, model: 0.6)
