"""The data of a recipe, and the error for data that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

from jacobiflow.core.results import JacobiflowError, one_line

Fit = Literal["crop", "stretch", "pad"]
VALIDATION = ("validation", "valid", "val", "test")  # names of held-out splits, the first that exists counts


class DataError(JacobiflowError, ValueError):
    """Data that is missing or cannot be used. The message is one line that says what to do."""


@contextmanager
def data_errors(problem: str, advice: str) -> Iterator[None]:
    """Report any error in one line. Damaged data makes other libraries raise almost anything."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{problem} ({one_line(error)[:300]}): {advice}") from None


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
