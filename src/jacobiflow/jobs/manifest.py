"""What a job keeps in its folder: a manifest that every process and restart reads, and shards with their records."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
import stat
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from textwrap import shorten
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from jacobiflow import __version__
from jacobiflow.core.files import read_text, sync, write_bytes
from jacobiflow.core.method import VERSION as PLAN_VERSION
from jacobiflow.core.method import Plan
from jacobiflow.core.pictures import sheet_bytes
from jacobiflow.core.records import RecordError, build, parse_json
from jacobiflow.core.results import Status, nonfinite_rows, one_line
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.weights import digest
from jacobiflow.jobs.sampling import JobError, Samples, Settings
from jacobiflow.kernels.build import version as kernels_version

FILE, SHARDS, RECORDS, PARTIAL = "manifest.json", "shards", "records", ".partial"
RECORD = RECORDS + "/{:06d}.json"
FORMAT = "jacobiflow-samples"
VERSION = 2  # 1: without a digest


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a finished shard holds and how it was made."""

    first: int
    count: int
    batch: int  # smaller than the job's if memory ran out
    files: dict[str, str]  # path and SHA-256
    status: dict[str, int]  # how many samples ended how
    versions: dict[str, str]
    nonfinite: list[int] = field(default_factory=list)  # samples that are NaN, or have no PNG
    job: str = ""  # digest of the job; "" in jobs begun by version 0.1

    def __post_init__(self) -> None:
        lost, known = len(set(self.nonfinite)), self.status.keys() <= Status.__members__.keys()
        agree = self.status.get("NONFINITE", 0) == lost == len(self.nonfinite) and self.batch > 0
        if not known or not agree or sum(self.status.values()) != self.count:
            raise RecordError("its counts do not agree")

    @classmethod
    def load(cls, path: Path) -> Record | None:
        """The record at `path`, if there is one, and if it is not damaged."""
        try:
            return None if path.is_symlink() else cls(**parse_json(read_text(path)))
        except (OSError, TypeError, ValueError, AttributeError):
            return None


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings, and what follows from them, the model and the machine that started the job. Shards are 0, 1, ..."""

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

    @property
    def count(self) -> int:
        """Of shards."""
        return -(-self.settings.n // self.shard)

    def finished(self, folder: Path) -> int:
        """How many samples are finished, by all processes."""
        with os.scandir(folder / RECORDS) as entries:
            return min(self.settings.n, self.shard * sum(e.name.endswith(".json") for e in entries))

    def rows(self, k: int) -> range:
        """The numbers of the samples of shard k."""
        return range(self.settings.n)[k * self.shard : (k + 1) * self.shard]

    def files(self, k: int, labelled: bool, nonfinite: Collection[int] = ()) -> list[str]:
        """Paths of its samples in the job's folder; a nonfinite sample has no PNG."""
        name = f"{SHARDS}/{k:06d}"
        if self.settings.format != "png":
            return [f"{name}.{self.settings.format}"]
        names = [f"{name}/{i:09d}.png" for i in self.rows(k) if i not in nonfinite]
        return [*names, f"{name}/metadata.csv"] if labelled else names

    def encode(self, k: int, samples: Samples, nonfinite: Collection[int]) -> dict[str, bytes]:
        """The content of each of its files."""
        x, labels, rows = samples.x, samples.labels, self.rows(k)
        names = self.files(k, labels is not None, nonfinite)
        if self.settings.format == "png":
            kept = [i for i, row in enumerate(rows) if row not in nonfinite]
            contents = [sheet_bytes(x[i : i + 1], columns=1, gap=0, zoom=1) for i in kept]
            if labels is not None:
                lines = (f"{rows[i]:09d}.png,{labels[i]}\n" for i in kept)
                contents.append("".join(["file_name,label\n", *lines]).encode())
            return dict(zip(names, contents, strict=True))
        arrays = {"x": x.numpy(), "index": np.array(rows)} | ({} if labels is None else {"labels": labels.numpy()})
        if self.settings.format == "safetensors":
            return {names[0]: safetensors.numpy.save(arrays)}
        np.savez(stream := io.BytesIO(), **arrays)  # type: ignore[arg-type]
        return {names[0]: stream.getvalue()}

    def finish(self, folder: Path, k: int, samples: Samples, batch: int, versions: dict[str, str]) -> None:
        """Write shard k: its files first, its record last, each atomically and synced to the disk."""
        rows, lost = self.rows(k), nonfinite_rows(samples.x).tolist()
        nonfinite = [row for row, is_lost in zip(rows, lost, strict=True) if is_lost]
        contents = self.encode(k, samples, set(nonfinite))
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
        how: dict[str, Any] = {"status": dict(samples.status), "versions": versions, "nonfinite": nonfinite}
        record = Record(first=rows.start, count=len(rows), batch=batch, files=sums, job=self.digest, **how)
        write(folder, contents)
        for name in self.files(k, False):  # an older PNG of a sample that is not finite
            if name not in contents:
                _refuse_link((folder / name).parent)
                (folder / name).unlink(missing_ok=True)
        write(folder, {RECORD.format(k): (json.dumps(asdict(record), indent=1) + "\n").encode()})

    def record(self, folder: Path, k: int) -> Record | None:
        """The record of shard k, if there is one of this job."""
        found, rows = Record.load(folder / RECORD.format(k)), self.rows(k)
        if found is None or (found.job, found.first, found.count) != (self.digest, rows.start, len(rows)):
            return None
        lost = set(found.nonfinite)
        files = self.files(k, False, lost), self.files(k, True, lost)
        return found if lost <= set(rows) and list(found.files) in files else None

    def holds(self, folder: Path, k: int, record: Record) -> bool:
        """Whether the files of shard k are the recorded ones, and no others are there."""
        others = (folder / name for name in self.files(k, False) if name not in record.files)
        try:
            intact = all(_digest(folder / name) == value for name, value in record.files.items())
            return intact and not any(map(os.path.lexists, others))
        except OSError:
            return False

    def signed(self) -> Job:
        """The job with its digest, which is equal for jobs that make the same shards with equal versions."""
        doc, became = json.loads(self.to_json()), ("tol", "init", "max_memory")  # what they became counts
        asked = {k: v for k, v in doc["settings"].items() if k not in became}
        made = {k: doc[k] for k in ("plan", "batch", "shard", "weights", "dtype")}
        return replace(self, digest=_checksum(asked | made))

    def to_json(self) -> str:
        """Text that `from_json` reads, without the plan's notes."""
        plan = json.loads(Plan(self.plan.methods).to_json())
        doc = {"format": FORMAT, "version": VERSION, **asdict(self), "plan": plan}
        return json.dumps(doc | {"checksum": _checksum(doc)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The job of `to_json`; a RecordError says what is wrong with other text."""
        doc = parse_json(text)
        if not isinstance(doc, dict) or doc.get("format") != FORMAT or doc.get("version") not in (1, VERSION):
            raise RecordError(f'it is not a manifest ("format": "{FORMAT}", "version": {VERSION})')
        if doc.pop("checksum", None) != _checksum(doc):
            raise RecordError("its checksum is wrong")
        plan, old = doc["plan"], doc["plan"]["version"] == 1
        doc["plan"] = Plan.from_json(json.dumps(plan | {"version": PLAN_VERSION} if old else plan))
        if old and doc["plan"].has_windows:
            advice = "finish it with version 0.1, or run tune again and begin in a new --out"
            raise JobError(f"its plan was made for closed windows, which this version does not have: {advice}")
        doc["settings"] = build(Settings, doc["settings"], "settings")
        return cls(**{f.name: doc[f.name] for f in fields(cls) if f.name in doc})

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
        mine, its = self.settings.compared(flow), other.compared(flow)
        its |= {k: mine[k] for k in ("batch", "shard") if its[k] == getattr(self, k)}  # what "auto" became
        keys = [k for k in mine if mine[k] != its[k]]
        if changed := [f"{k} {shorten(str(mine[k]), 40)}, now {shorten(str(its[k]), 40)}" for k in keys]:
            what = f"{folder} holds a job with other settings ({'; '.join(changed)})"
            raise JobError(f"{what}: use those, or begin in a new --out")
        if fingerprint(flow) != self.weights:
            raise JobError(f"{folder} holds samples of another model than this: begin in a new --out")
        own = versions(next(flow.parameters()).device)
        if changed := [f"{k} {v}, now {own.get(k)}" for k, v in self.versions.items() if own.get(k) != v]:
            what = f"the job began with {'; '.join(changed)}"
            warnings.warn(f"{what}: the last digits of new samples may differ", stacklevel=2)


def fingerprint(flow: Flow) -> str:
    """A digest of config and weights."""
    return digest(flow.state_dict(), flow.family, repr(flow.config))


def versions(device: torch.device) -> dict[str, str]:
    """What can change the last bits of a sample besides settings and weights."""
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else processor
    found = {"jacobiflow": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return found | {"numpy": np.__version__, "transformer": kernels_version(), "machine": machine}


def _checksum(doc: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(doc, sort_keys=True).encode()).hexdigest()


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files into `folder`. None is ever seen half-written."""
    places = {(folder / name).parent for name in contents}
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        _refuse_link(place)
    for name, data in contents.items():
        write_bytes(folder / name, data, partial=folder / PARTIAL)
    for place in places | {place.parent for place in places}:
        sync(place)


def _refuse_link(place: Path) -> None:
    if place.is_symlink():
        raise OSError(errno.ELOOP, f"{place} is a link, and a job writes into its own folder only")


def _digest(path: Path) -> str:
    """SHA-256 of a plain file; OSError for links, pipes and devices."""
    _refuse_link(path.parent)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return hashlib.file_digest(file, "sha256").hexdigest()
