"""Images from a source named by one string: an .npz file, a folder, a Hugging Face dataset."""

from __future__ import annotations

import os
import re
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from statistics import median_low
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from jacobiflow.data.decoding import MAX_PIXELS, SUFFIXES, DataError, Fit, Form, Images, Part, Rows, look
from jacobiflow.data.hub import is_dataset, open_dataset
from jacobiflow.data.local import open_folder, open_npz

ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # a dataset id of the hub: name or owner/name
SURVEYED = 500  # images
FILES = SUFFIXES | {".npz", ".npy", ".parquet", ".arrow", ".csv", ".zip", ".tar", ".gz", ".tgz"}


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The images, which of them are for validation, and how they become square."""

    source: str = ""  # An .npz file, a folder of images, or a Hugging Face dataset: its id or its folder.
    validation: float = 0.05  # Share of images held out, if the source has no split of its own.
    split_seed: int = 0  # Seed that chooses the held-out images, and those that `limit` keeps.
    limit: int = 0  # Most training images to use, chosen by split_seed; 0: all. Validation is not affected.
    fit: Fit = "crop"  # How an image becomes square: crop the centre, stretch, or pad with black borders.
    image_column: str = ""  # Hugging Face datasets: the column of images; empty: found by its type.
    label_column: str = ""  # Hugging Face datasets: the column of class numbers; empty: found by its type.
    subset: str = ""  # Hugging Face datasets: the configuration, if there are several.
    revision: str = ""  # Datasets of the hub: commit, tag or branch; empty: the newest commit.

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise DataError(f"data.validation must be in [0, 1), not {self.validation}")
        if self.limit < 0:
            raise DataError(f"data.limit must be 0 or more, not {self.limit}")
        if not 0 <= self.split_seed < 2**63:
            raise DataError(f"data.split_seed must be below 2^63 and 0 or more, not {self.split_seed}")
        if self.fit not in get_args(Fit):
            raise DataError(f"data.fit must be {' or '.join(get_args(Fit))}, not {self.fit!r}")


def load_images(
    config: DataConfig, *, image_size: int | None = None, channels: int | None = None, num_classes: int = 0
) -> tuple[Images, Images]:
    """Training and validation images of config.source: [N, channels, image_size, image_size].

    image_size: None keeps the size, which must be the same for all. channels: 1 is grey (ITU-R 601 luminance), 3 is
    RGB, None is grey if all training images are. Labels are below num_classes; 0 drops them. Images that cannot be
    read are left out, with one warning. Of a source without a split of its own config.validation is held out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/tiny.npz", x=np.zeros((40, 8, 8, 3), np.uint8), y=np.arange(40) % 2)
    ...     config = DataConfig(source=f"{folder}/tiny.npz", validation=0.1)
    ...     train, validation = load_images(config, image_size=4, channels=1, num_classes=2)
    >>> train.pixels.shape, validation.labels.shape
    (torch.Size([36, 1, 4, 4]), torch.Size([4]))
    """
    if image_size is not None and not 1 <= image_size <= isqrt(MAX_PIXELS):
        raise DataError(f"the image size must be from 1 to {isqrt(MAX_PIXELS):,}, not {image_size}")
    if channels not in (None, 1, 3):
        raise DataError(f"images have 1 (grey) or 3 (RGB) channels, not {channels}")
    train, own = _open(config)
    if not len(train):
        raise DataError(f"{train.name} holds no images")
    rows, held_rows = _split(len(train), config if own is None else replace(config, validation=0))
    labels = _labels(train, num_classes)
    held, held_labels = train, labels
    if own is not None:
        held, held_rows, held_labels = own, np.arange(len(own)), _labels(own, num_classes)
    form = Form(image_size, channels, config.fit)
    seen, failed = train.read(rows, form, labels)
    if not len(seen):
        raise DataError(f"{train.name}: none of {len(rows)} images can be read: {_some(failed)}")
    _, channels, height, width = seen.pixels.shape
    unseen, also = held.read(held_rows, replace(form, channels=channels, like=(height, width)), held_labels)
    if failed := failed + also:
        count = f"{len(failed)} of {len(rows) + len(held_rows)} images"
        warnings.warn(f"{config.source}: {count} cannot be read and are left out: {_some(failed)}", stacklevel=2)
    return replace(seen, classes=train.classes if num_classes else ()), unseen


@dataclass(frozen=True)
class Survey:
    """What a source holds, by the headers of some of its training images."""

    count: int  # training images, and those that are held out of them
    sizes: tuple[tuple[int, int], ...]  # width and height, sorted
    channels: int  # 1 if all are grey, else 3
    classes: int  # 0 if there are no labels
    names: tuple[str, ...] = ()  # of the classes, where known
    side: int = 0  # the median of the shorter sides

    def __str__(self) -> str:
        low, high = (f"{w} x {h}" for w, h in (self.sizes[0], self.sizes[-1]))
        size = low if low == high else f"{len(self.sizes)} sizes from {low} to {high}"
        return f"{size} {'grey' if self.channels == 1 else 'colour'}"


def survey(config: DataConfig) -> Survey:
    """Look at a source without decoding it: sizes and colours of up to SURVEYED images, and the classes."""
    part, _ = _open(config)
    rows = np.unique(np.linspace(0, len(part) - 1, min(len(part), SURVEYED)).astype(np.int64))
    seen = list[tuple[int, int, int]]()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # what it says of large pictures is said when they are read
        for row in rows.tolist():
            with suppress(Exception):  # damaged ones are named when they are read
                seen.append(look(part.item(row)[1]))
    if not seen:
        raise DataError(f"{part.name}: none of {len(rows)} images can be read")
    classes = 0
    with suppress(DataError):  # it has no labels
        classes = int(part.labels().max()) + 1
    return Survey(
        count=len(part),
        sizes=tuple(sorted({(w, h) for w, h, _ in seen})),
        channels=max(c for *_, c in seen),
        classes=classes if classes > 1 else 0,
        names=part.classes if classes > 1 else (),
        side=median_low(min(w, h) for w, h, _ in seen),
    )


def _open(config: DataConfig) -> tuple[Part, Part | None]:
    """The training part of a source, and its validation part if it has one."""
    source, kinds = config.source, "an .npz file, a folder of images or a Hugging Face dataset id"
    path = Path(os.path.expanduser(source))
    if not source:
        raise DataError(f"data.source is empty: set it to {kinds}")
    suffix, there = path.suffix.lower(), os.path.isfile(path)
    if os.path.isdir(path):
        return open_dataset(config, path) if is_dataset(path) else open_folder(path)
    if there and suffix == ".npz":
        return open_npz(path)
    if there and suffix == ".parquet":
        return open_dataset(config, path)
    near = "/" in source and os.path.isdir(path.parent)  # then it is a misspelt path
    if not there and ID.fullmatch(source) and suffix not in FILES and not near:
        return open_dataset(config, None)
    raise DataError(f"{source} {'is not' if there else 'does not exist: give'} {kinds}")


def _split(count: int, config: DataConfig) -> tuple[Rows, Rows]:
    """The rows of the images to train on, in ascending order, and of those to hold out, in random order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(config.split_seed)).numpy()
    cut = min(max(1, round(count * config.validation)), count - 1) if config.validation else 0
    return np.sort(order[cut : cut + config.limit] if config.limit else order[cut:]), order[:cut]


def _labels(part: Part, num_classes: int) -> Tensor | None:
    """The labels of all images of a part, None without classes; DataError if one is out of range."""
    if not num_classes:
        return None
    labels = part.labels()
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        bad, top = int(labels[wrong[0]]), int(labels.max())
        name = f" ({part.classes[bad]})" if 0 <= bad < len(part.classes) else ""
        label = f"label {bad}{name} of image {wrong[0]} is outside 0 to {num_classes - 1}"
        advice = f"set num_classes to {top + 1} or choose other data" if labels.min() >= 0 else "fix the labels"
        raise DataError(f"{part.name}: {label}: {advice}")
    return torch.from_numpy(labels.astype(np.int64))


def _some(lines: list[str], shown: int = 3) -> str:
    more = f" and {len(lines) - shown} more" if len(lines) > shown else ""
    return ", ".join(lines[:shown]) + more
