"""`tune`: the fastest plan of a flow on this machine; `auto_plan`: the one that is kept, or a new one."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from tqdm import tqdm

from jacobiflow.core import tune as core
from jacobiflow.core.cache_folder import own_folder
from jacobiflow.core.hardware import machine
from jacobiflow.core.plan import Plan
from jacobiflow.flows.arguments import instance
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.guidance import Guidance
from jacobiflow.flows.stored_plans import Setting, find, store
from jacobiflow.flows.weights import digest
from jacobiflow.kernels import native
from jacobiflow.kernels.threads import torch_single_threaded

ROWS = 64  # samples, at least, that deviations are measured on, to choose and again to verify
LARGEST = 256  # the largest batch that "auto" tunes for
SEED = 2**31 - 1  # of the noise that plans are tuned on

_tuning = threading.Lock()  # two at once would time each other
_known: dict[tuple[Path | None, Setting], Plan] = {}
_digests: WeakKeyDictionary[Flow, tuple[int, str]] = WeakKeyDictionary()


def tune(
    flow: Flow,
    batch_size: int = 16,
    max_deviation: float | None = None,
    *,
    labels: int | Tensor | None = None,
    context: Tensor | None = None,
    guidance: float | Guidance = 0.0,
    rows: int = ROWS,
    clock: core.Clock | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The fastest plan for `batch_size` samples at once, measured on this machine.

    Times sequential decoding and sweeps of several widths, tolerances and first guesses in each block
    and keeps what is fastest while the samples stay within `max_deviation` (default 0.05 for TarFlow,
    1e-4 for MAF and NSF) of sequential decoding, the largest |x - exact| of any number. The plan's
    `about` says what was measured.

    The bound is measured, on at least `rows` samples when choosing and as many fresh ones when
    verifying, and kept with a margin of a fifth; it is not guaranteed for every sample to come.
    labels, context: of the samples, or a few that are used in turn.

    >>> from jacobiflow import MAF, MAFConfig
    >>> flow = MAF(MAFConfig(features=4, blocks=2, hidden=(16,)))
    >>> plan = tune(flow, batch_size=2)
    >>> len(plan), plan.about["setting"]["batch"]
    (2, 2)
    """
    instance(Flow, flow)
    bound = flow.default_deviation if max_deviation is None else max_deviation
    if batch_size < 1 or rows < 1:
        raise ValueError(f"tune takes batch_size and rows of 1 or more, not {batch_size} and {rows}")
    if not 0 < bound < math.inf:
        raise ValueError(f"max_deviation must be positive, not {bound}: 'sequential' is the exact plan")
    guide = guidance if isinstance(guidance, Guidance) else Guidance(weight=guidance)
    total = 2 * batch_size * math.ceil(rows / batch_size)
    if isinstance(labels, Tensor) and labels.ndim == 1 and len(labels):
        labels = labels[torch.arange(total) % len(labels)]
    if context is not None and context.ndim == 2 and len(context):
        context = context[torch.arange(total) % len(context)]
    setting = setting_of(flow, batch_size, labels is not None, guide, bound)

    @torch.no_grad()
    def measure() -> Plan:
        stack = flow.bound_blocks(total, labels=labels, context=context, guidance=guide)
        z = flow.to_prior(flow.noise(total, SEED))
        with torch_single_threaded(z[:batch_size]):  # as decoding will be
            return core.tune(
                stack,
                z,
                batch=batch_size,
                max_deviation=bound,
                unit=flow.default_unit,
                rivals=_rivals(flow, bound),
                clock=clock or clock_of(z.device),
                progress=progress,
            )

    plan = flow.with_weights(measure)
    return Plan(plan.methods, about={"setting": asdict(setting), **plan.about})


def _rivals(flow: Flow, bound: float) -> list[list[Plan]]:
    """The plans that a user could name, the loosest first."""
    tols = core.tolerances(bound)
    return [[flow.plan(name, tol=tol) for tol in tols] for name in ("selective", "uniform")]


def auto_plan(
    flow: Flow,
    n: int,
    *,
    labels: int | Tensor | None = None,
    context: Tensor | None = None,
    guidance: float | Guidance = 0.0,
    max_deviation: float | None = None,
    clock: core.Clock | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Plan:
    """The plan for n samples at once: the one that is kept for this machine, or one that is made now.

    Plans are made for batches of powers of two, for all classes in turn and for guidance in half
    steps; other requests take the nearest batch and the next stronger guidance. clock, progress: as in
    `tune`; what they raise ends the tuning, and nothing is kept.
    """
    if n == 0:
        return Plan.sequential(len(flow.blocks))
    guide = guidance if isinstance(guidance, Guidance) else Guidance(weight=guidance)
    flow.bound_blocks(n, labels=labels, context=context, guidance=guide)  # raises if they do not fit
    setting = auto_setting(flow, n, labels is not None, guide, max_deviation)
    key = own_folder("plans"), setting
    with _tuning:
        plan = _known.get(key) or find(setting, len(flow.blocks))
        if plan is None:
            with tqdm(desc=f"tuning batches of {setting.batch}, once", disable=None, leave=False) as bar:

                def told(text: str) -> None:
                    bar.set_postfix_str(text)
                    progress(text)

                plan = tune(
                    flow,
                    setting.batch,
                    setting.max_deviation,
                    labels=None if labels is None else torch.arange(flow.num_classes),
                    context=context,
                    guidance=setting.guidance,
                    clock=clock,
                    progress=told,
                )
            keep(plan, setting)
        _known[key] = plan
    return plan


def keep(plan: Plan, setting: Setting) -> Path | None:
    """Where the plan was stored; None, and a warning, if it cannot be.

    From now on it is the one that this process uses, whichever it used before.
    """
    _known[own_folder("plans"), setting] = plan
    try:
        return store(plan, setting)
    except OSError as error:
        warnings.warn(f"the tuned plan is not kept, set JACOBIFLOW_CACHE: {error}", stacklevel=3)
        return None


def nearest(n: int) -> int:
    """The batch size that is tuned for n samples: a power of two.

    >>> [nearest(n) for n in (1, 2, 3, 5, 6, 100, 1000)]
    [1, 2, 4, 4, 8, 128, 256]
    """
    return min(1 << round(math.log2(n)), LARGEST)


def half_step(guidance: Guidance) -> Guidance:
    """The guidance that is tuned for: weaker ones deviate less.

    >>> half_step(Guidance(weight=1.2)).weight
    1.5
    """
    weight = math.copysign(math.ceil(abs(guidance.weight) * 2) / 2, guidance.weight)
    return replace(guidance, weight=weight) if weight else Guidance()


def auto_setting(
    flow: Flow, n: int, labels: bool, guidance: Guidance, max_deviation: float | None = None
) -> Setting:
    """What plan="auto" tunes for when n samples are asked for."""
    instance(Flow, flow)
    bound = flow.default_deviation if max_deviation is None else max_deviation
    return setting_of(flow, nearest(n), labels, half_step(guidance), bound)


def setting_of(flow: Flow, batch: int, labels: bool, guidance: Guidance, bound: float) -> Setting:
    """What a plan of this flow is measured for, here and now."""
    like = next(flow.parameters())
    with torch.no_grad():
        compiled = native.usable(like) is not None
    return Setting(
        weights=_digest(flow),
        machine=machine(like.device),
        device=like.device.type,
        threads=torch.get_num_threads(),
        dtype=str(like.dtype).removeprefix("torch."),
        compiled=compiled,
        torch=torch.__version__,
        batch=batch,
        labels=labels,
        guidance=guidance,
        max_deviation=bound,
    )


def _digest(flow: Flow) -> str:
    """The digest of config and weights; read again only after a weight has changed."""
    version = flow.refuse_nonfinite()
    known = _digests.get(flow)
    if known is None or known[0] != version:
        known = _digests[flow] = version, digest(flow.state_dict(), flow.family, repr(flow.config))
    return known[1]


def clock_of(device: torch.device) -> core.Clock:
    """Seconds, after the device has done what it was given."""
    if device.type != "cuda":
        return time.perf_counter

    def seconds() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return seconds
