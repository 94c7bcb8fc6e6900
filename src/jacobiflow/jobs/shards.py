"""Shards: consecutive samples in their own files, and a record of what the files must hold."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from jacobiflow.core.files import read_text, sync, write_bytes
from jacobiflow.core.pictures import sheet_bytes
from jacobiflow.core.records import parse_json
from jacobiflow.core.results import Status, nonfinite_rows
from jacobiflow.jobs.sampling import Format, Samples

NAMES = {status.name for status in Status}
SHARDS, RECORDS, PARTIAL = "shards", "records", ".partial"


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
            kept = [(i, row) for i, row in enumerate(self.rows) if row not in nonfinite]
            contents = [sheet_bytes(x[i : i + 1], columns=1, gap=0, zoom=1) for i, _ in kept]
            if labels is not None:
                lines = (f"{row:09d}.png,{labels[i]}" for i, row in kept)
                contents.append("\n".join(["file_name,label", *lines, ""]).encode())
            return dict(zip(names, contents, strict=True))
        arrays = {"x": x.numpy(), "index": np.array(self.rows)}
        if labels is not None:
            arrays["labels"] = labels.numpy()
        if self.format == "safetensors":
            return {names[0]: safetensors.numpy.save(arrays)}
        stream = io.BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]
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
            if path.is_symlink():
                return None
            record = cls(**parse_json(read_text(path)))
            return record if shard is None or record._fits(shard) else None
        except (OSError, TypeError, ValueError, AttributeError):
            return None

    def _fits(self, shard: Shard) -> bool:
        lost = set(self.nonfinite)
        return (
            (self.job, self.first, self.count) == (shard.job, shard.rows.start, len(shard.rows))
            and self.batch > 0
            and self.status.keys() <= NAMES
            and sum(self.status.values()) == self.count
            and lost <= set(shard.rows)
            and self.status.get("NONFINITE", 0) == len(lost) == len(self.nonfinite)
            and list(self.files) in (shard.files(False, lost), shard.files(True, lost))
        )

    def holds(self, folder: Path, shard: Shard) -> bool:
        """Whether the files are the recorded ones, and no others are there."""
        try:
            places = {(folder / name).parent for name in shard.files(False)}
            others = (folder / name for name in shard.files(False) if name not in self.files)
            return (
                not any(map(os.path.islink, places))
                and not any(map(os.path.lexists, others))
                and all(_digest(folder / name) == value for name, value in self.files.items())
            )
        except OSError:
            return False


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
            _refuse_link((folder / name).parent)
            (folder / name).unlink(missing_ok=True)
    write(folder, {shard.record: (json.dumps(asdict(record), indent=1) + "\n").encode()})


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write files into `folder`. None is ever seen half-written."""
    for place in {(folder / name).parent for name in contents}:
        place.mkdir(parents=True, exist_ok=True)
        _refuse_link(place)
    for name, data in contents.items():
        write_bytes(folder / name, data, partial=folder / PARTIAL)
    for place in {place for name in contents for place in (folder / name).parents[:2]}:
        sync(place)


def _refuse_link(place: Path) -> None:
    if place.is_symlink():
        raise OSError(errno.ELOOP, f"{place} is a link, and a job writes into its own folder only")


def _digest(path: Path) -> str:
    """SHA-256 of a plain file; OSError for links, pipes and devices."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as f:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a plain file")
        return hashlib.file_digest(f, "sha256").hexdigest()
