"""Samples side by side (Figures 3, A7 and A8)."""

from __future__ import annotations

from jacobiflow_lab.analysis.plots import save_grids
from jacobiflow_lab.metrics.reconstruction import errors, reconstruction
from jacobiflow_lab.paper.sampling import METHODS, all_plans, draw, to_pixels
from jacobiflow_lab.paper.schema import Item, Picture, Result
from jacobiflow_lab.paper.session import Task

COLUMNS = 8
OTHER_SAMPLES = 24  # of each method that is not in the first picture
BOTH = ("sequential", "selective")


def run(task: Task) -> Result:
    """The same noise by every method, denoised as the paper's samples are."""
    n, batch = task.scale.shown, task.scale.batches[-1]
    images = {method: draw(task, plan, n) for method, plan in all_plans(task, batch, METHODS).items()}
    pixels = {method: to_pixels(x) for method, x in images.items()}
    pair, rest = task.picture("samples"), task.picture("samples-more")
    save_grids(pair, {m: pixels[m] for m in BOTH}, columns=COLUMNS, across=2, title=task.model)
    others = {m: x[:OTHER_SAMPLES] for m, x in pixels.items() if m not in BOTH}
    save_grids(rest, others, columns=COLUMNS, across=2)
    exact = images["sequential"]
    apart = {m: reconstruction(errors(exact, x)) for m, x in images.items() if m != "sequential"}
    rows = [{"method": m} | vars(found) | {"grey_levels": found.mean * 127.5} for m, found in apart.items()]
    return Result(
        data={"tau": task.scale.tau, "rows": rows},
        counts={"samples": n},
        pictures=(
            Picture(pair.name, f"{task.model}: the same noise by both decoders.", task.restricted),
            Picture(rest.name, f"{task.model}: the same noise by the other methods.", task.restricted),
        ),
    )


ITEM = Item(name="samples", run=run, minutes=lambda scale, model: 0.6)
