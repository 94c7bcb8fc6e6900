"""Reconstruction of real images (Figures A4 to A6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch

from jacobiflow_lab.analysis.plots import save_rows
from jacobiflow_lab.metrics.reconstruction import errors, reconstruct, reconstruction
from jacobiflow_lab.paper import paper_figures
from jacobiflow_lab.paper.item import Cell, Docs, Figure, Item, Picture, Result, Table, missing_rows, present
from jacobiflow_lab.paper.workshop import AT_ONCE, METHODS, TAU, Context

SHOWN = 12


def run(context: Context) -> Result:
    """Test images to noise and back by every method."""
    shop, flow = context.workshop, context.flow
    test = shop.images(context.model)[1]
    n = min(len(test), shop.samples or context.scale.reconstructed)
    index = torch.linspace(0, len(test) - 1, n).long()
    plans = {m: shop.plan(context.model, m, context.scale.batches[-1], tau=TAU) for m in METHODS}
    rows, shown = {}, {}
    for method, plan in plans.items():
        found, pictures = [], []
        for some in torch.split(index, AT_ONCE):
            x = (test.pixels[some].to(shop.device).float() / 127.5 - 1).reshape(-1, *flow.data_shape)
            labels = None if test.labels is None else test.labels[some].to(shop.device)
            again = reconstruct(flow, x, plan, **({} if labels is None else {"labels": labels}))
            found.append(errors(x, again))
            pictures.append(again)
        rows[method] = asdict(reconstruction(torch.cat(found)))
        shown[method] = torch.cat(pictures)[:SHOWN]
    original = test.pixels[index[:SHOWN]].float() / 127.5 - 1
    path = context.picture("reconstruction")
    save_rows(
        [("original", original), ("selective", shown["selective"].reshape(original.shape).cpu())],
        path,
        title=f"{context.model}: test images, and decoded from their noise at tau {TAU:g}",
        shown=SHOWN,
    )
    return Result(
        data={"tau": TAU, "rows": rows},
        counts={"images": n},
        pictures=(
            Picture(
                path.name, f"{context.model}: originals above, reconstructions below.", context.restricted
            ),
        ),
    )


def tables(docs: Docs) -> list[Table]:
    """Mean squared error of every method."""
    head = ("model", "method", "mean squared error", "mean |error|", "largest |error|", "images")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for i, method in enumerate(docs[model]["data"]["rows"]):
            at = f"rows/{method}"
            rows.append(
                (
                    model if i == 0 else "",
                    method,
                    Figure(model, f"{at}/mse", "{:.2g}"),
                    Figure(model, f"{at}/mean", "{:.2g}"),
                    Figure(model, f"{at}/largest", "{:.2g}"),
                    Figure(model, f"{at}/images", "{:,}"),
                )
            )
    note = (
        "Test images in [-1, 1], encoded exactly and decoded by the method: uniform and selective from "
        "zeros as the paper's algorithm, at tau 0.5."
    )
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


ITEM = Item(
    name="reconstruction",
    title="Reconstruction",
    shows="Figures A4, A5 and A6",
    models=lambda scale: scale.images,
    run=run,
    tables=tables,
    theirs=(paper_figures.reconstruction(),),
    words="Rows of originals and reconstructions that cannot be told apart.",
    minutes=lambda scale, model: 0.3,
)
