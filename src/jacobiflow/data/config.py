"""What a recipe says about its data, and the error for data that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from jacobiflow.core.types import JacobiflowError

Fit = Literal["crop", "stretch", "pad"]


class DataError(JacobiflowError, ValueError):
    """Data that is not there or cannot be used; one line that names it and says what to do."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, which of them validate, and how they become square."""

    source: str = ""
    """An .npz file, a folder of images, a Hugging Face dataset id, or a folder that holds such a dataset."""

    validation: float = 0.05
    """Share of the images that is held out for validation if the source brings no split of its own."""

    split_seed: int = 0
    """Seed of the choice of held-out images, and of those that `limit` keeps."""

    limit: int = 0
    """Use at most this many training images, chosen by split_seed; 0: all. Validation is not affected."""

    fit: Fit = "crop"
    """How an image becomes square: crop its centre, stretch it, or pad it with black borders."""

    image_column: str = ""
    """Hugging Face datasets: the column of images; empty: find it."""

    label_column: str = ""
    """Hugging Face datasets: the column of class numbers; empty: find it."""

    subset: str = ""
    """Hugging Face datasets: the configuration, for datasets that have several."""

    revision: str = ""
    """Datasets of the hub: the commit, tag or branch; empty: the newest. A commit never changes."""

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise DataError(f"data.validation must be in [0, 1), not {self.validation}")
        for name in ("limit", "split_seed"):
            if getattr(self, name) < 0:
                raise DataError(f"data.{name} must be 0 or more, not {getattr(self, name)}")
        if not self.split_seed < 2**63:
            raise DataError(f"data.split_seed must be below 2^63, not {self.split_seed}")
        if self.fit not in get_args(Fit):
            raise DataError(f"data.fit must be {' or '.join(get_args(Fit))}, not {self.fit!r}")
