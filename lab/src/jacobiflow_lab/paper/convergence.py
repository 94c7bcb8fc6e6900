"""How Jacobi sweeps converge, layer by layer (Figures 4 and A2)."""

from __future__ import annotations

from collections.abc import Sequence

from jacobiflow_lab.analysis.convergence import convergence
from jacobiflow_lab.analysis.plots import save_convergence, save_ratios
from jacobiflow_lab.paper.item import Cell, Docs, Figure, Item, Picture, Result, Table, missing_rows, present
from jacobiflow_lab.paper.workshop import Context

SHARES = (0.1, 0.01, 0.001)  # of the first error


def run(context: Context) -> Result:
    """Error after each sweep, from zeros as in the paper's algorithm, in float64."""
    n = context.scale.analysed
    z = context.flow.noise(n, context.seed)
    found = convergence(context.flow, z, init="zeros", double=True, **context.condition(n))
    curves, ratios = context.picture("convergence"), context.picture("ratios")
    save_convergence(found, curves, title=f"{context.model}: distance from the exact answer")
    save_ratios(found, ratios, title=f"{context.model}: ratio of successive errors")
    doc = found.to_dict()
    for block in doc["blocks"]:
        errors = block["jacobi"]
        block["reached"] = [reached(errors, share) for share in SHARES]
        block["sweeps"] = len(errors) - 1
    return Result(
        data=doc | {"shares": list(SHARES)},
        counts={"samples": n},
        seeds={"noise": context.seed},
        pictures=(
            Picture(curves.name, f"{context.model}: sweeps, and one position a step as the paper counts it."),
            Picture(ratios.name, f"{context.model}: below 1 a sweep gains; a falling line is superlinear."),
        ),
    )


def reached(errors: Sequence[float | None], share: float) -> int | None:
    """The first step at which the error is that share of the first one; None: it never is.

    >>> reached([8.0, 2.0, 0.5], 0.1)
    2
    """
    first = errors[0]
    if first is None:
        return None
    return next((t for t, e in enumerate(errors) if e is not None and e <= share * first), None)


def tables(docs: Docs) -> list[Table]:
    """Sweeps to bring the error down, a row for each layer."""
    head = ("model", "layer", "positions", "to 10%", "to 1%", "to 0.1%", "to the end", "ratio falls")
    rows: list[Sequence[Cell]] = []
    for model in present(docs):
        for k, block in enumerate(docs[model]["data"]["blocks"]):
            at = f"blocks/{k}"
            falls = block["ratio_falls"]
            rows.append(
                (
                    model if k == 0 else "",
                    str(k + 1),
                    Figure(model, f"{at}/length", "{}"),
                    *(Figure(model, f"{at}/reached/{i}", "{}") for i in range(len(SHARES))),
                    Figure(model, f"{at}/sweeps", "{}"),
                    "too few sweeps to tell" if falls is None else "yes" if falls else "no",
                )
            )
    note = "Sweeps until the mean error is that share of the first one, from zeros, in float64."
    return [Table(title="Ours", head=head, rows=[*rows, *missing_rows(docs, len(head))], note=note)]


ITEM = Item(
    name="convergence",
    title="Convergence of sweeps",
    shows="Figures 4 and A2",
    models=lambda scale: scale.images,
    run=run,
    tables=tables,
    words=(
        "Error of Jacobi iterates and of sequential decoding against iterations in all 8 layers of AFHQ: "
        "Jacobi is near zero long before 1024, and slowest in the first layer. The plots have no numbers."
    ),
    minutes=lambda scale, model: 0.1,
)
