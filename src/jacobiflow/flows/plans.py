"""What the `plan` argument of a flow stands for: a name, a file, a Plan, or the default."""

from __future__ import annotations

import os
from pathlib import Path
from reprlib import repr as short
from typing import TYPE_CHECKING

from torch import Tensor

from jacobiflow.core.arguments import word
from jacobiflow.core.method import INITS, Init, Plan, PlanError
from jacobiflow.core.suggest import did_you_mean
from jacobiflow.flows.auto_plan import auto_plan, recall
from jacobiflow.flows.guidance import Guidance
from jacobiflow.kernels.backend import Backend

if TYPE_CHECKING:
    from jacobiflow.flows.flow import Flow

PLANS = ("sequential", "uniform", "selective", "auto")
SWEPT = ("uniform", "selective")  # the names that take tol and init


def resolve_plan(
    flow: Flow,
    plan: str | Path | Plan | None = None,
    *,
    tol: float | None = None,
    init: Init | None = None,
    max_deviation: float | None = None,
    n: int = 1,
    context: Tensor | None = None,
    guidance: float | Guidance | None = None,
    backend: Backend | None = None,
) -> Plan:
    """The Plan that a name, a path, a Plan or None stands for, with every default spelled out.

    None is "auto", or "selective" with `tol` or `init`. n (how many samples are decoded at once), context, guidance
    and backend are for "auto".
    """
    if plan is None:
        plan = "auto" if tol is None and init is None else "selective"
    if not isinstance(plan, str | Path | Plan):
        raise PlanError(f"a plan is a name, a jf.Plan or a path, not {short(plan)}")
    if max_deviation is not None and plan != "auto":
        raise TypeError("max_deviation belongs to plan 'auto', the default: other plans have their own tol")
    if isinstance(plan, str) and plan in SWEPT:
        if init is not None:
            word("init", init, INITS)
        tol = flow.default_tol if tol is None else tol
        uniform = Plan.uniform(len(flow.blocks), tol=tol, init=init)
        found = uniform if plan == "uniform" else flow.selective(tol, init)
    elif tol is not None or init is not None:
        raise TypeError("tol and init belong to plans 'uniform' and 'selective': leave them out")
    elif plan == "auto":
        found = auto_plan(flow, n, max_deviation=max_deviation, context=context, guidance=guidance, backend=backend)
    elif plan == "sequential":
        found = Plan.sequential(len(flow.blocks))
    elif isinstance(plan, str) and not plan.endswith(".json") and not os.path.exists(plan):
        known, hint = ", ".join(PLANS), did_you_mean(plan, PLANS)
        raise PlanError(f"no plan is called {short(plan)}{hint}: use {known}, a jf.Plan or a JSON file")
    else:
        found = plan if isinstance(plan, Plan) else Plan.load(plan)
    if len(found) != len(flow.blocks):
        raise PlanError(f"the plan has {len(found)} methods, the flow {len(flow.blocks)} blocks")
    if any(m.init == "calibrated" for m in found) and flow.guesses() is None:
        recall(flow)
    needs_guesses = any(m.init in (None, "calibrated") for m in found if m.width != 1)
    return found.resolved(flow.default_unit, calibrated=needs_guesses and flow.guesses() is not None)
