"""How Jacobi sweeps converge, block by block (Figures 4 and A2)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jacobiflow_lab.analysis.convergence import convergence
from jacobiflow_lab.analysis.plots import save_convergence, save_ratios
from jacobiflow_lab.paper.schema import Item, Result
from jacobiflow_lab.paper.session import Task

SHARES = (0.1, 0.01, 0.001)  # of the first error
CURVE_SAMPLES = 16  # enough for curves


def run(task: Task) -> Result:
    """The error after each sweep, from zeros as in the paper's algorithm, in float64."""
    n = min(task.scale.analysed, CURVE_SAMPLES)
    z = task.flow.noise(n, task.seed)
    found = convergence(task.flow, z, init=task.scale.inits[0], double=True, labels=task.labels(n))
    doc = found.to_dict()
    blocks = doc["blocks"]
    for block in blocks:
        errors = block["jacobi"]
        block |= {"reached": [sweeps_to(errors, share) for share in SHARES], "sweeps": len(errors) - 1}
    doc |= {
        "most_sweeps": max(block["sweeps"] for block in blocks),
        "error_left": max(b["jacobi"][-1] / b["jacobi"][0] if b["jacobi"][0] else 0.0 for b in blocks),
        "falling": sum(block["ratio_falls"] is True for block in blocks),
        "telling": sum(block["ratio_falls"] is not None for block in blocks),
        "shares": list(SHARES),
    }
    curves = partial(save_convergence, found, title=f"{task.model}: distance from the exact answer")
    ratios = partial(save_ratios, found, title=f"{task.model}: ratio of successive errors")
    counted = f"{task.model}: sweeps, and one position per step as the paper counts it. Lower is better."
    falling = f"{task.model}: below 1 a sweep gains; a falling line is superlinear."
    pictures = (task.picture("convergence", counted, curves), task.picture("ratios", falling, ratios))
    return Result(data=doc, counts={"samples": n}, pictures=pictures)


def sweeps_to(errors: Sequence[float | None], share: float) -> int | None:
    """Sweeps until the error is at most that share of the first one; None: it never is.

    >>> sweeps_to([8.0, 2.0, 0.5], 0.1)
    2
    """
    first = errors[0]
    if first is None:
        return None
    return next((t for t, e in enumerate(errors) if e is not None and e <= share * first), None)


ITEM = Item(name="convergence", run=run, minutes=lambda scale, model: 0.3)
