"""Tuned plans in the user's cache folder, each for one setting: weights, machine, batch and so on."""

from __future__ import annotations

import hashlib
import json
import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from jacobiflow.core.folders import cache_folder
from jacobiflow.core.plan import Plan, PlanError
from jacobiflow.flows.checkpoint import write_atomically
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

    def path(self) -> Path:
        """Where the plan for this setting is kept."""
        text = json.dumps(asdict(self), sort_keys=True)
        return cache_folder() / "plans" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


@cache
def machine(device: torch.device) -> str:
    """The name of the processor that does the work."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not on every system
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def find(setting: Setting, blocks: int) -> Plan | None:
    """The stored plan, if there is one that can be read and is for this setting."""
    try:
        plan = Plan.load(setting.path())
    except PlanError:
        return None
    fits = len(plan) == blocks and plan.about.get("setting") == asdict(setting)
    return plan if fits else None


def store(plan: Plan, setting: Setting) -> Path:
    """Keep a plan, in one step: whoever reads meanwhile gets the old one or the new one."""
    path = setting.path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, plan.save)
    return path
