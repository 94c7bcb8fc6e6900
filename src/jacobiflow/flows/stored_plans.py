"""Tuned plans in the user's cache folder, each for one setting: weights, machine, batch and so on."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from jacobiflow.core.cache_folder import own_folder, read_own, warn_once, write_own
from jacobiflow.core.plan import VERSION, Plan
from jacobiflow.core.tune import tolerances
from jacobiflow.flows.guidance import Guidance


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a plan was measured for; elsewhere another may be faster, or less exact."""

    weights: str  # their digest
    machine: str
    device: str
    threads: int
    dtype: str
    compiled: bool  # whether the compiled functions did the work
    torch: str
    batch: int
    labels: bool
    guidance: Guidance
    max_deviation: float

    def path(self) -> Path | None:
        """Where the plan for this setting is kept; None if the cache folder is not safe."""
        text = json.dumps(asdict(self), sort_keys=True)
        folder = own_folder("plans")
        return folder and folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def find(setting: Setting, blocks: int) -> Plan | None:
    """The stored plan, if there is one for this setting that the tuner could have made."""
    path = setting.path()
    if path is None:
        return None
    try:
        plan = Plan.from_json(read_own(path).decode(), oldest=VERSION)
    except (OSError, ValueError):
        return None
    if len(plan) != blocks or plan.about.get("setting") != asdict(setting):
        return None
    loosest = max((method.tol for method in plan), default=0.0)
    if loosest > max(tolerances(setting.max_deviation)):
        warn_once(
            f"the stored plan {path} is ignored: its tolerance {loosest:g} is larger than any that the tuner "
            f"tries for a deviation of {setting.max_deviation:g}"
        )
        return None
    return plan


def store(plan: Plan, setting: Setting) -> Path | None:
    """Keep a plan; None if the cache folder is not safe."""
    path = setting.path()
    if path is not None:
        write_own(path, plan.to_json().encode())
    return path
