"""What a job keeps in its folder: a manifest, and shards of consecutive samples, each with a record of its files.

Every process and every restart reads the manifest, so that all of them do the same work.
"""

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
from typing import Any

import numpy as np
import safetensors.numpy
import torch

from jacobiflow import __version__
from jacobiflow.core.files import MAX_TEXT_BYTES, read_text, sync, write_bytes, write_text
from jacobiflow.core.method import VERSION as PLAN_VERSION
from jacobiflow.core.method import Plan
from jacobiflow.core.pictures import sheet_bytes
from jacobiflow.core.records import RecordError, build, parse_json
from jacobiflow.core.results import Status, nonfinite_rows, one_line
from jacobiflow.flows.flow import Flow
from jacobiflow.flows.weights import digest
from jacobiflow.jobs.sampling import Format, JobError, Samples, Settings
from jacobiflow.kernels.build import version as kernels_version

FILE, SHARDS, RECORDS, PARTIAL = "manifest.json", "shards", "records", ".partial"
FORMAT = "jacobiflow-samples"
VERSION = 2  # 1: without a digest


@dataclass(frozen=True)
class Shard:
    """Consecutive samples."""

    number: int
    rows: range  # the numbers of its samples
    format: Format
    job: str  # digest of its job

    @property
    def record(self) -> str:
        """Path of its record in the job's folder."""
        return f"{RECORDS}/{self.number:06d}.json"

    def files(self, labelled: bool, nonfinite: Collection[int] = ()) -> list[str]:
        """Paths of its samples in the job's folder; a nonfinite sample has no PNG."""
        name = f"{SHARDS}/{self.number:06d}"
        if self.format != "png":
            return [f"{name}.{self.format}"]
        names = [f"{name}/{i:09d}.png" for i in self.rows if i not in nonfinite]
        return [*names, f"{name}/metadata.csv"] if labelled else names

    def encode(self, samples: Samples, nonfinite: Collection[int]) -> dict[str, bytes]:
        """The content of each of its files."""
        x, labels = samples.x, samples.labels
        names = self.files(labels is not None, nonfinite)
        if self.format == "png":
            kept = [i for i, row in enumerate(self.rows) if row not in nonfinite]
            contents = [sheet_bytes(x[i : i + 1], columns=1, gap=0, zoom=1) for i in kept]
            if labels is not None:
                lines = (f"{self.rows[i]:09d}.png,{labels[i]}\n" for i in kept)
                contents.append("".join(["file_name,label\n", *lines]).encode())
            return dict(zip(names, contents, strict=True))
        arrays = {"x": x.numpy(), "index": np.array(self.rows)}
        if labels is not None:
            arrays["labels"] = labels.numpy()
        if self.format == "safetensors":
            return {names[0]: safetensors.numpy.save(arrays)}
        np.savez(stream := io.BytesIO(), **arrays)  # type: ignore[arg-type]
        return {names[0]: stream.getvalue()}


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

    @classmethod
    def load(cls, path: Path, shard: Shard | None = None) -> Record | None:
        """The record at `path`, if there is one, and if it is of `shard`."""
        try:
            record = None if path.is_symlink() else cls(**parse_json(read_text(path)))
            return record if record is None or shard is None or record._fits(shard) else None
        except (OSError, TypeError, ValueError, AttributeError):
            return None

    def _fits(self, shard: Shard) -> bool:
        lost = set(self.nonfinite)
        return (
            (self.job, self.first, self.count) == (shard.job, shard.rows.start, len(shard.rows))
            and self.batch > 0
            and self.status.keys() <= Status.__members__.keys()
            and sum(self.status.values()) == self.count
            and lost <= set(shard.rows)
            and self.status.get("NONFINITE", 0) == len(lost) == len(self.nonfinite)
            and list(self.files) in (shard.files(False, lost), shard.files(True, lost))
        )

    def holds(self, folder: Path, shard: Shard) -> bool:
        """Whether the files are the recorded ones, and no others are there."""
        others = (folder / name for name in shard.files(False) if name not in self.files)
        try:
            intact = all(_digest(folder / name) == value for name, value in self.files.items())
        except OSError:
            return False
        return intact and not any(map(os.path.lexists, others))


def finish(folder: Path, shard: Shard, samples: Samples, batch: int, versions: dict[str, str]) -> None:
    """Write a shard: its files first, its record last, each atomically and synced to the disk."""
    lost = [row for row, is_lost in zip(shard.rows, nonfinite_rows(samples.x).tolist(), strict=True) if is_lost]
    contents = shard.encode(samples, set(lost))
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    how: dict[str, Any] = {"batch": batch, "status": dict(samples.status), "versions": versions, "nonfinite": lost}
    record = Record(first=shard.rows.start, count=len(shard.rows), files=sums, job=shard.job, **how)
    write(folder, contents)
    for name in shard.files(False):  # an older PNG of a sample that is not finite
        if name not in contents:
            refuse_link((folder / name).parent)
            (folder / name).unlink(missing_ok=True)
    write(folder, {shard.record: (json.dumps(asdict(record), indent=1) + "\n").encode()})


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files into `folder`. None is ever seen half-written."""
    for place in {(folder / name).parent for name in contents}:
        place.mkdir(parents=True, exist_ok=True)
        refuse_link(place)
    for name, data in contents.items():
        write_bytes(folder / name, data, partial=folder / PARTIAL)
    for place in {place for name in contents for place in (folder / name).parents[:2]}:
        sync(place)


def refuse_link(place: Path) -> None:
    """A folder may come from somebody else: nothing outside of it is written to."""
    if place.is_symlink():
        raise OSError(errno.ELOOP, f"{place} is a link, and a job writes into its own folder only")


def _digest(path: Path) -> str:
    """SHA-256 of a plain file; OSError for links, pipes and devices."""
    refuse_link(path.parent)
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return hashlib.file_digest(file, "sha256").hexdigest()


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
        """Of shards."""
        return -(-self.settings.n // self.shard)

    def finished(self, folder: Path) -> int:
        """How many samples are finished, by all processes."""
        with os.scandir(folder / RECORDS) as entries:
            return min(self.settings.n, self.shard * sum(e.name.endswith(".json") for e in entries))

    def part(self, number: int) -> Shard:
        """Shard `number`."""
        rows = range(self.settings.n)[number * self.shard : (number + 1) * self.shard]
        return Shard(number, rows, self.settings.format, self.digest)

    def to_doc(self) -> dict[str, Any]:
        """Plain data, without the plan's notes."""
        return asdict(self) | {"plan": json.loads(Plan(self.plan.methods).to_json())}

    def record(self, folder: Path, number: int) -> Record | None:
        """The record of shard `number`, if there is one."""
        shard = self.part(number)
        return Record.load(folder / shard.record, shard)

    def signed(self) -> Job:
        """The job with its digest, which is equal for jobs that make the same shards with equal versions.

        It is computed once and stored, so that a later version may write plans in another format.
        """
        doc, became = self.to_doc(), ("tol", "init", "max_memory")  # what they became counts
        asked = {k: v for k, v in doc["settings"].items() if k not in became}
        made = {k: doc[k] for k in ("plan", "batch", "shard", "weights", "dtype")}
        return replace(self, digest=_checksum(asked | made))

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        doc = {"format": FORMAT, "version": VERSION, **self.to_doc()}
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

    def save(self, folder: Path) -> None:
        """Write the manifest into `folder` atomically, if it can be read again."""
        if len(text := self.to_json()) > MAX_TEXT_BYTES:
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
        mine, its = ({**asdict(s), "plan": s.given_plan(flow), "max_memory": 0} for s in (self.settings, other))
        its |= {k: mine[k] for k in ("batch", "shard") if its[k] == getattr(self, k)}  # what "auto" became
        if changed := [f"{k} {_say(k, mine[k])}, now {_say(k, its[k])}" for k in mine if mine[k] != its[k]]:
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


def _say(name: str, value: Any) -> str:
    """A setting, shortened: plans are long."""
    text = "auto" if name in ("batch", "shard") and not value else str(value)
    return text if len(text) < 40 else f"{text[:36]} ..."
