"""The manifest of a job: its settings, and what they were resolved to when it started.

Every process and every restart reads it, so that all of them do the same work.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import warnings
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jacobiflow import __version__
from jacobiflow.core.files import MAX_TEXT_BYTES, read_text, write_text
from jacobiflow.core.method import VERSION as PLAN_VERSION
from jacobiflow.core.method import Plan
from jacobiflow.core.records import RecordError, build, parse_json
from jacobiflow.core.results import one_line
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.weights import digest
from jacobiflow.jobs.sampling import JobError, Settings
from jacobiflow.jobs.shards import RECORDS, Shard
from jacobiflow.kernels.build import version as kernels_version

FILE = "manifest.json"
FORMAT = "jacobiflow-samples"
VERSION = 2  # 1: without a digest


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings, and what follows from them, the model and the machine that started the job."""

    settings: Settings
    model: str
    plan: Plan
    batch: int
    shard: int
    weights: str  # the flow's `fingerprint`
    dtype: str
    versions: dict[str, str]
    revision: str | None = None  # of a model from the hub
    digest: str = ""  # of everything that decides the bits of a sample; every record repeats it

    def __post_init__(self) -> None:
        if min(self.batch, self.shard, self.settings.n, self.settings.threads) < 1:
            raise RecordError("n, batch, shard and threads must be 1 or more")

    @property
    def count(self) -> int:
        """How many shards there are."""
        return -(-self.settings.n // self.shard)

    def finished(self, folder: Path) -> int:
        """How many samples are finished, by all processes."""
        with os.scandir(folder / RECORDS) as entries:
            return min(self.settings.n, self.shard * sum(e.name.endswith(".json") for e in entries))

    def part(self, number: int) -> Shard:
        """Shard `number`."""
        rows = range(self.settings.n)[number * self.shard : (number + 1) * self.shard]
        return Shard(number, rows, self.settings.format, self.digest)

    def signed(self) -> Job:
        """The job with its digest, which is equal for jobs that make the same shards with equal versions.

        It is computed once and stored, so that a later version may write plans in another format.
        """
        became = ("plan", "tol", "init", "batch", "shard", "max_memory")  # what they became counts
        asked = {k: v for k, v in asdict(self.settings).items() if k not in became}
        made = {"plan": _methods(self.plan), "batch": self.batch, "shard": self.shard}
        return replace(self, digest=_checksum(asked | made | {"weights": self.weights, "dtype": self.dtype}))

    def to_json(self) -> str:
        """Text that `from_json` reads, without the plan's notes."""
        doc = {"format": FORMAT, "version": VERSION, **asdict(self), "plan": _methods(self.plan)}
        return json.dumps(doc | {"checksum": _checksum(doc)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job of `to_json`; a RecordError says what is wrong with other text."""
        doc = parse_json(text)
        if not isinstance(doc, dict) or doc.get("format") != FORMAT or doc.get("version") not in (1, VERSION):
            raise RecordError(f'it is not a manifest ("format": "{FORMAT}", "version": {VERSION})')
        if doc.pop("checksum", None) != _checksum(doc):
            raise RecordError("its checksum is wrong")
        plain: dict[str, Any] = {f.name: doc[f.name] for f in fields(cls) if f.name in doc}
        plain["settings"] = build(Settings, plain["settings"], "settings")
        plan, old = plain["plan"], plain["plan"]["version"] == 1
        plain["plan"] = Plan.from_json(json.dumps(plan | {"version": PLAN_VERSION} if old else plan))
        if old and plain["plan"].has_windows:
            advice = "finish it with version 0.1, or run tune again and begin in a new --out"
            raise JobError(f"its plan was made for closed windows, which this version does not have: {advice}")
        return cls(**plain)

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder` atomically, if it can be read again."""
        text = self.to_json()
        try:
            same = len(text) <= MAX_TEXT_BYTES and Job.from_json(text) == self
        except (ValueError, TypeError, KeyError):
            same = False
        if not same:
            raise JobError("these settings cannot be written down: use shorter ones, or a smaller plan")
        write_text(folder / FILE, text)

    @classmethod
    def load(cls, folder: Path) -> Job | None:
        """The job in `folder`, if there is one."""
        path = folder / FILE
        if path.is_symlink():
            raise JobError(f"{path} is a link: put the file itself there, or begin in a new --out")
        try:
            return cls.from_json(read_text(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except JobError as error:
            raise JobError(f"{folder} holds a job that cannot be resumed: {error}") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            advice = "restore it, or begin again in a new --out"
            raise JobError(f"{path} is damaged ({one_line(error)}): {advice}") from None

    def compare(self, other: Settings, flow: Flow, folder: Path) -> None:
        """Raise if the settings or the model differ from this job's; warn if the versions do."""
        mine, its = asdict(self.settings), asdict(other)
        became = [name for name in ("batch", "shard") if its[name] == getattr(self, name)]  # what "auto" became
        keys = [k for k in mine if k not in ("max_memory", *became) and not _same(mine[k], its[k])]
        changed = [f"{k} {_say(mine[k])}, now {_say(its[k])}" for k in keys]
        if changed:
            what = f"{folder} holds a job with other settings ({'; '.join(changed)})"
            raise JobError(f"{what}: use those, or begin in a new --out")
        if fingerprint(flow) != self.weights:
            raise JobError(f"{folder} holds samples of another model than this: begin in a new --out")
        own = versions(next(flow.parameters()).device)
        changed = [f"{k} {v}, now {own.get(k)}" for k, v in self.versions.items() if own.get(k) != v]
        if changed:
            what = f"the job began with {'; '.join(changed)}"
            warnings.warn(f"{what}: the last digits of new samples may differ", stacklevel=2)


def fingerprint(flow: Flow) -> str:
    """A digest of config and weights."""
    return digest(flow.state_dict(), flow.family, repr(flow.config))


def versions(device: torch.device) -> dict[str, str]:
    """What can change the last bits of a sample besides settings and weights."""
    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {
        "jacobiflow": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "transformer": kernels_version(),
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else machine,
    }


def _checksum(doc: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(doc, sort_keys=True).encode()).hexdigest()


def _methods(plan: Plan) -> Any:
    """A plan as plain data, without its notes."""
    return json.loads(Plan(plan.methods).to_json())


def _same(mine: Any, its: Any) -> bool:
    """Whether two settings are the same. Plans are, where one lacks units and first guesses that the flow adds."""
    if mine == its or not all(isinstance(s, str) and s.startswith("{") for s in (mine, its)):
        return bool(mine == its)
    a, b = Plan.from_json(mine), Plan.from_json(its)
    return len(a) == len(b) and all(
        replace(m, unit=m.unit or n.unit, init=m.init or n.init) == n for m, n in zip(a, b, strict=True)
    )


def _say(value: Any) -> str:
    """A setting, shortened: plans are long."""
    text = "auto" if value == 0 and type(value) is int else str(value)
    return text if len(text) < 40 else f"{text[:36]} ..."
