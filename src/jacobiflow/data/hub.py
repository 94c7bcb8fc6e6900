"""Images in Hugging Face datasets, from the hub or from a local folder."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jacobiflow.core.progress import note
from jacobiflow.core.tables import pip_install
from jacobiflow.data.decoding import VALIDATION, DataError, Encoded, Part, data_errors

if TYPE_CHECKING:
    from jacobiflow.data.sources import DataConfig


class HubPart(Part):
    """One split of a Hugging Face dataset."""

    def __init__(self, dataset: Any, config: DataConfig, split: str) -> None:
        self.name = f"{config.source} ({split})" if split else config.source
        self.dataset, self.split, self.config = dataset.with_format(None), split or "dataset", config
        hf, features = library(), self.dataset.features
        pictures = [n for n, f in features.items() if isinstance(f, hf.Image)]
        # Files written by other programs hold the encoded images as plain bytes, alone or beside their path.
        raw = {n: f.get("bytes") if isinstance(f, dict) else f for n, f in features.items()}
        plain = [n for n, f in raw.items() if f == hf.Value("binary")]
        found = pictures or plain
        self.column = self._pick("image", config.image_column, found, ("image", "img"), pictures + plain)
        # Undecoded: a damaged image costs one row only, and sizes are checked before memory is taken.
        self.cells = self.dataset.select_columns([self.column]).cast_column(self.column, hf.Image(decode=False))

    def __len__(self) -> int:
        return len(self.dataset)

    def labels(self) -> npt.NDArray[Any]:
        features = self.dataset.features
        named = [n for n, f in features.items() if isinstance(f, library().ClassLabel)]
        found = named or [n for n in ("label", "labels", "class", "y") if n in features]
        column = self._pick("label", self.config.label_column, found, ("label",), list(features))
        self.classes = tuple(getattr(features[column], "names", None) or ())
        values = list(self.dataset[column])
        if None in values:
            wrong = f"column {column!r} has no label in row {values.index(None)}"
            raise DataError(f"{self.name}: {wrong}: choose other data")
        labels = np.array(values)
        if len(values) and (labels.dtype.kind not in "iu" or labels.ndim != 1):
            wrong = f"column {column!r} does not hold class numbers but values like {values[0]!r}"
            raise DataError(f"{self.name}: {wrong}: set data.label_column to one that does")
        return labels.astype(np.int64)

    def item(self, row: int) -> tuple[str, Encoded]:
        cell = self.cells[row][self.column] or {}
        content, path = cell.get("bytes"), cell.get("path")
        return f"{self.split} row {row}", content or (Path(path) if path else b"")

    def _pick(self, what: str, wanted: str, found: list[str], preferred: tuple[str, ...], allowed: list[str]) -> str:
        """The column that the user asks for, or else the only candidate."""
        if wanted and wanted not in allowed:
            known = ", ".join(allowed) or "(it has none)"
            raise DataError(f"{self.name} has no {what} column {wanted!r}: set data.{what}_column to one of {known}")
        best = [wanted] if wanted else [n for n in preferred if n in found] or found
        if not best:
            wrong = f"{self.name} has no column of {what}s, only {', '.join(self.dataset.features)}"
            raise DataError(f"{wrong}: set data.{what}_column or choose other data")
        if len(best) > 1 and best[0] not in preferred:
            raise DataError(f"{self.name}: set data.{what}_column to one of {', '.join(best)}")
        return best[0]


def is_dataset(path: Path) -> bool:
    """Whether save_to_disk wrote this folder, or its first two levels hold parquet files."""
    return _is_saved(path) or any(any(path.glob(name)) for name in ("*.parquet", "*/*.parquet"))


def _is_saved(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def open_dataset(config: DataConfig, path: Path | None) -> tuple[HubPart, HubPart | None]:
    """The split train, or the only one, and a validation or test split; path: None if config.source is an id."""
    hf = library(config.source)
    problem = "cannot be read as a Hugging Face dataset" if path else "is no file, folder or Hugging Face dataset"
    with data_errors(f"{config.source} {problem}", "check the path or the id, and its files"), _quiet(hf):
        splits = _splits(hf, config, path)
        train = next(iter(splits)) if len(splits) == 1 else "train"
        if train not in splits:
            listed = ", ".join(splits) or "none"
            raise DataError(f"{config.source} has no split called train (its splits: {listed}): choose other data")
        held = next((name for name in VALIDATION if name in splits and name != train), None)
        data = HubPart(splits[train](), config, train)
        return data, None if held is None else HubPart(splits[held](), config, held)


@contextmanager
def _quiet(hf: Any) -> Iterator[None]:
    """Hide the library's progress bars away from a terminal, and its messages about retries."""
    log = logging.getLogger("huggingface_hub")
    with ExitStack() as undo:
        undo.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)
        if not sys.stderr.isatty() and not hf.utils.are_progress_bars_disabled():
            undo.callback(hf.enable_progress_bars)
            hf.disable_progress_bars()
        yield


def _splits(hf: Any, config: DataConfig, path: Path | None) -> dict[str, Callable[[], Any]]:
    """A function that loads each split, by its name; the name is "" for data without splits."""
    if path is not None and _is_saved(path):
        saved = hf.load_from_disk(str(path))
        return {name: partial(saved.get, name) for name in saved} if isinstance(saved, dict) else {"": lambda: saved}
    if path is not None and path.is_file():
        return {"": partial(hf.load_dataset, "parquet", data_files=str(path), split="train")}
    where, subset, pinned = str(path or config.source), config.subset or None, {}
    if path is None:
        note(f"looking for {config.source} on the Hugging Face hub")
        if commit := find_commit(config.source, config.revision):  # all splits are of one commit
            pinned = {"revision": commit}
            note(f"{config.source} is at commit {commit} (pin it with --data.revision)")
    names = hf.get_dataset_split_names(where, subset, **pinned)
    return {name: partial(hf.load_dataset, where, subset, split=name, **pinned) for name in names}


def find_commit(source: str, revision: str) -> str:
    """The commit of a dataset's `revision` ("": the newest); `revision` itself if the hub does not answer."""
    if not re.fullmatch("[0-9a-f]{40}", revision):
        with suppress(Exception):  # no connection or a wrong name: the datasets library decides
            from huggingface_hub import HfApi

            return HfApi().dataset_info(source, revision=revision or None, timeout=10).sha or revision
    return revision


def library(source: str = "a Hugging Face dataset") -> Any:
    """The optional dependency `datasets`; DataError says how to install it."""
    try:
        import datasets
    except ImportError:
        wrong = f"{source} is no .npz file or folder of images here, and Hugging Face datasets need a library"
        raise DataError(f"{wrong}: {pip_install('[data]')}") from None
    return datasets
