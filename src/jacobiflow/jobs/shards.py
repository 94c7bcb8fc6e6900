"""Shards: consecutive samples in files of their own, and a record that says what they must hold."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
import torch
from PIL import Image
from torch import Tensor

from jacobiflow.core.records import parse_json, read_text
from jacobiflow.core.types import Status
from jacobiflow.data.pictures import as_images, to_pixels
from jacobiflow.flows.nonfinite import nonfinite_rows

Format = Literal["npz", "safetensors", "png"]
NAMES = {status.name for status in Status}
SHARDS, RECORDS, PARTIAL = "shards", "records", ".partial"


@dataclass(frozen=True)
class Shard:
    """Samples first .. first + count - 1."""

    number: int
    first: int
    count: int
    format: Format
    job: str  # digest of the job that it belongs to

    @property
    def name(self) -> str:
        return f"{self.number:06d}"

    @property
    def record(self) -> str:
        """Where its record is, seen from the job's folder."""
        return f"{RECORDS}/{self.name}.json"

    def files(self, labelled: bool, nonfinite: Collection[int] = ()) -> list[str]:
        """Where its samples are, seen from the job's folder; a nonfinite sample has no PNG."""
        if self.format != "png":
            return [f"{SHARDS}/{self.name}.{self.format}"]
        folder = f"{SHARDS}/{self.name}"
        kept = (i for i in range(self.first, self.first + self.count) if i not in nonfinite)
        names = [f"{folder}/{i:09d}.png" for i in kept]
        return [*names, f"{folder}/metadata.csv"] if labelled else names

    def nonfinite(self, x: Tensor) -> list[int]:
        """The numbers of the samples in x that are not finite."""
        return [self.first + i for i, lost in enumerate(nonfinite_rows(x).tolist()) if lost]

    def encode(self, x: Tensor, labels: Tensor | None) -> dict[str, bytes]:
        """The content of each of its files."""
        names = self.files(labels is not None, set(self.nonfinite(x)))
        if self.format == "png":
            kept = ~nonfinite_rows(x)
            pictures = _pictures(x[kept], names, None if labels is None else labels[kept])
            return dict(zip(names, pictures, strict=True))
        arrays = {"x": x.numpy(), "index": np.arange(self.first, self.first + self.count)}
        if labels is not None:
            arrays["labels"] = labels.numpy()
        if self.format == "safetensors":
            return {names[0]: safetensors.numpy.save(arrays)}
        stream = io.BytesIO()
        np.savez(stream, **arrays)  # type: ignore[arg-type]
        return {names[0]: stream.getvalue()}


def _pictures(x: Tensor, names: list[str], labels: Tensor | None) -> list[bytes]:
    images = as_images(x)
    assert images is not None
    found = []
    for pixels in to_pixels(images):
        stream = io.BytesIO()
        Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels).save(stream, "png")
        found.append(stream.getvalue())
    if labels is not None:
        rows = [f"{Path(n).name},{label}" for n, label in zip(names, labels.tolist(), strict=False)]
        found.append("\n".join(["file_name,label", *rows, ""]).encode())
    return found


@dataclass(frozen=True, kw_only=True)
class Record:
    """What a finished shard holds and how it was made."""

    first: int
    count: int
    batch: int  # smaller than the job's if memory ran out
    files: dict[str, str]  # SHA-256 of each
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
        """The record of `shard`, if it has one that can be that shard's."""
        found = cls.load(folder / shard.record)
        if found is None or found.job != shard.job:
            return None
        try:
            fits = (found.first, found.count) == (shard.first, shard.count) and found.batch > 0
            fits = fits and found.status.keys() <= NAMES and sum(found.status.values()) == shard.count
            lost = set(found.nonfinite)
            fits = fits and lost <= set(range(shard.first, shard.first + shard.count))
            fits = fits and found.status.get("NONFINITE", 0) == len(lost) == len(found.nonfinite)
            known = shard.files(False, lost), shard.files(True, lost)
            return found if fits and list(found.files) in known else None
        except (TypeError, AttributeError):
            return None

    def holds(self, folder: Path, shard: Shard) -> bool:
        """Whether the files are those that were written, and no others."""
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
    """Write a shard: its files first, its record last, each in one step and down to the disk."""
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
    """Put files into `folder`. None is ever seen half-written: they move there when they are on the disk."""
    moves: list[tuple[Path, Path]] = []
    try:
        for name, data in contents.items():
            moves.append((folder / PARTIAL / secrets.token_hex(16), folder / name))
            with open(moves[-1][0], "xb") as f:
                f.write(data)
        for source, _ in moves:
            sync(source)
        for target in {target.parent for _, target in moves}:
            target.mkdir(parents=True, exist_ok=True)
            _refuse_link(target)
        for source, target in moves:
            os.replace(source, target)
        for place in {place for _, target in moves for place in target.parents[:2]}:
            sync(place)
    except BaseException:
        for source, _ in moves:
            with suppress(OSError):
                source.unlink(missing_ok=True)
        raise


def _refuse_link(place: Path) -> None:
    if place.is_symlink():
        raise OSError(errno.ELOOP, f"{place} is a link, and a job writes into its own folder only")


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    """SHA-256 of a plain file. Links lead elsewhere, pipes and devices may never end: an OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(handle, "rb") as f:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no plain file")
        return hashlib.file_digest(f, "sha256").hexdigest()


def turn(labels: tuple[int, ...], first: int, count: int) -> Tensor | None:
    """The labels of samples first .. first + count - 1."""
    return torch.tensor(labels)[torch.arange(first, first + count) % len(labels)] if labels else None
