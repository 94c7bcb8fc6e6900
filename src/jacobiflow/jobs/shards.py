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
from PIL import Image
from torch import Tensor

from jacobiflow.core.files import read_text, sync, write_bytes
from jacobiflow.core.pictures import as_images, png_bytes, to_pixels
from jacobiflow.core.records import parse_json
from jacobiflow.core.results import Status, nonfinite_rows
from jacobiflow.jobs.sampling import Format

NAMES = {status.name for status in Status}
SHARDS, RECORDS, PARTIAL = "shards", "records", ".partial"


@dataclass(frozen=True)
class Shard:
    """Samples first .. first + count - 1."""

    number: int
    first: int
    count: int
    format: Format
    job: str  # digest of its job

    @property
    def name(self) -> str:
        return f"{self.number:06d}"

    @property
    def record(self) -> str:
        """Path of its record in the job's folder."""
        return f"{RECORDS}/{self.name}.json"

    def files(self, labelled: bool, nonfinite: Collection[int] = ()) -> list[str]:
        """Paths of its samples in the job's folder; a nonfinite sample has no PNG."""
        if self.format != "png":
            return [f"{SHARDS}/{self.name}.{self.format}"]
        folder = f"{SHARDS}/{self.name}"
        kept = (i for i in range(self.first, self.first + self.count) if i not in nonfinite)
        names = [f"{folder}/{i:09d}.png" for i in kept]
        return [*names, f"{folder}/metadata.csv"] if labelled else names

    def nonfinite(self, x: Tensor) -> list[int]:
        """Indices of the samples in x that are not finite."""
        return [self.first + i for i, lost in enumerate(nonfinite_rows(x).tolist()) if lost]

    def encode(self, x: Tensor, labels: Tensor | None) -> dict[str, bytes]:
        """The content of each of its files."""
        names = self.files(labels is not None, set(self.nonfinite(x)))
        if self.format == "png":
            kept = ~nonfinite_rows(x)
            contents = _png_files(x[kept], names, None if labels is None else labels[kept])
            return dict(zip(names, contents, strict=True))
        arrays = {"x": x.numpy(), "index": np.arange(self.first, self.first + self.count)}
        if labels is not None:
            arrays["labels"] = labels.numpy()
        if self.format == "safetensors":
            return {names[0]: safetensors.numpy.save(arrays)}
        stream = io.BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]
        return {names[0]: stream.getvalue()}


def _png_files(x: Tensor, names: list[str], labels: Tensor | None) -> list[bytes]:
    """One PNG per sample and, with labels, a table of them."""
    images = as_images(x)
    assert images is not None
    contents = []
    for pixels in to_pixels(images):
        contents.append(png_bytes(Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)))
    if labels is not None:
        rows = [f"{Path(n).name},{label}" for n, label in zip(names, labels.tolist(), strict=False)]
        contents.append("\n".join(["file_name,label", *rows, ""]).encode())
    return contents


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
    def load(cls, path: Path) -> Record | None:
        """The record at `path`, if there is one."""
        try:
            return None if path.is_symlink() else cls(**parse_json(read_text(path)))
        except (OSError, TypeError, ValueError):
            return None

    @classmethod
    def read(cls, folder: Path, shard: Shard) -> Record | None:
        """The record of `shard`, if there is one that fits it."""
        record = cls.load(folder / shard.record)
        try:
            return record if record is not None and record._fits(shard) else None
        except (TypeError, AttributeError):
            return None

    def _fits(self, shard: Shard) -> bool:
        lost = set(self.nonfinite)
        return (
            (self.job, self.first, self.count) == (shard.job, shard.first, shard.count)
            and self.batch > 0
            and self.status.keys() <= NAMES
            and sum(self.status.values()) == shard.count
            and lost <= set(range(shard.first, shard.first + shard.count))
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


def finish(folder: Path, shard: Shard, contents: Mapping[str, bytes], **about: Any) -> Record:
    """Write a shard: its files first, its record last, each atomically and synced to the disk."""
    sums = {name: hashlib.sha256(data).hexdigest() for name, data in contents.items()}
    record = Record(first=shard.first, count=shard.count, files=sums, job=shard.job, **about)
    write(folder, contents)
    for name in shard.files(False):  # an older PNG of a sample that is not finite
        if name not in contents:
            _refuse_link((folder / name).parent)
            (folder / name).unlink(missing_ok=True)
    write(folder, {shard.record: (json.dumps(asdict(record), indent=1) + "\n").encode()})
    return record


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
