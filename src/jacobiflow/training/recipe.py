"""Recipe: model, data and training as one record; a TOML file, the API and the flags are the same."""

from __future__ import annotations

import math
import tomllib
from dataclasses import asdict, dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from jacobiflow.core.records import RecordError, build, read_text
from jacobiflow.data.ising import Ising, parse_target
from jacobiflow.data.sources import DataConfig
from jacobiflow.data.transforms import Noise
from jacobiflow.flows.maf import MAFConfig
from jacobiflow.flows.tarflow import TarFlowConfig


class RecipeError(RecordError):
    """A recipe that cannot be read or makes no sense."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The loop: what is added to the data, how weights move, what is written when."""

    epochs: float = 10.0  # Passes over the training images; with a target, of 100 steps each.
    batch_size: int = 256  # Images a step, over all processes and accumulation steps.
    accumulate: int = 1  # Parts of a batch that a process computes one after the other, to save memory.
    lr: float = 1e-4  # Learning rate after the warm-up.
    final_lr: float = 1e-6  # Learning rate at the end of the cosine.
    warmup_epochs: float = 1.0  # Epochs of linear warm-up.
    betas: tuple[float, float] = (0.9, 0.95)  # Of AdamW.
    weight_decay: float = 1e-4  # Of AdamW.
    clip: float = 0.0  # Largest norm of the gradient; 0: any.
    noise: Noise = "gaussian"  # Normal of model.noise_std; or uniform, on grey levels or on black and white.
    tol: float = 1e-4  # With a target: of the sweeps that draw samples. Loose ones bias gradients.
    label_drop: float = 0.0  # Share of labels that are left out, so that the model learns to do without.
    flip: bool = False  # Mirror every second image, at random.
    ema: float = 0.0  # Decay of averaged weights, which are then the result; 0: no average.
    seed: int = 0  # Of first weights, order of data, noise, flips and dropped labels.
    bf16: bool = True  # Compute in bfloat16 where that is safe; on CUDA only.
    compile: bool = False  # Use torch.compile: slow to start, then faster.
    tensorboard: bool = False  # Write for TensorBoard too.
    log_every: int = 50  # Steps between lines of the log.
    save_every: int = 500  # Steps between states to go on from.
    keep_every: int = 0  # Steps between weights that are kept for good; 0: none.
    sample_every: int = 2000  # Steps between sample grids; 0: none.
    validate: int = 1000  # Validation images (with a target, samples) looked at every epoch; 0: none.

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "log_every", "save_every"):
            if getattr(self, name) < 1:
                raise RecipeError(f"training.{name} must be 1 or more, not {getattr(self, name)}")
        for name in ("epochs", "lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise RecipeError(f"training.{name} must be positive, not {getattr(self, name)}")
        for name, most in (("epochs", 1e9), ("lr", 1e30), ("final_lr", 1e30), ("weight_decay", 1e30)):
            if getattr(self, name) > most:
                raise RecipeError(f"training.{name} must be {most:g} or less, not {getattr(self, name)}")
        if not self.seed < 2**63:
            raise RecipeError(f"training.seed must be below 2^63, not {self.seed}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise RecipeError(f"training.betas must be in [0, 1), not {self.betas}")
        for name in ("label_drop", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise RecipeError(f"training.{name} must be in [0, 1), not {getattr(self, name)}")
        rates = ("final_lr", "warmup_epochs", "weight_decay", "clip", "tol")
        for name in (*rates, "seed", "sample_every", "keep_every", "validate"):
            if not 0 <= getattr(self, name) < math.inf:
                raise RecipeError(f"training.{name} must be 0 or more, not {getattr(self, name)}")
        if self.noise not in get_args(Noise):
            raise RecipeError(f"training.noise must be {' or '.join(get_args(Noise))}, not {self.noise!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `jacobiflow train` runs."""

    model: TarFlowConfig | MAFConfig
    data: DataConfig = field(default_factory=DataConfig)
    target: Ising | None = None  # a density to be fitted by reverse KL, in place of data
    training: TrainingConfig = field(default_factory=TrainingConfig)
    about: str = ""

    def __post_init__(self) -> None:
        if self.target is not None:
            self._check_target(self.target)
            return
        std, noise = getattr(self.model, "noise_std", 0.0), self.training.noise
        if noise == "gaussian" and not std:
            raise RecipeError(
                "training.noise gaussian needs a model with a noise_std above 0: set it, or another noise"
            )
        if noise != "gaussian" and std:
            raise RecipeError(
                f"model.noise_std {std} is for training.noise gaussian, not {noise}: set it to 0"
            )

    def _check_target(self, target: Ising) -> None:
        model = self.model
        if not isinstance(model, MAFConfig) or model.features != target.sites or model.context:
            raise RecipeError(
                f"a target of {target.sites} sites needs a model of family maf with as many features "
                "and without context"
            )
        if self.data.source:
            raise RecipeError("a recipe has data or a target, not both: leave data.source empty")

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recipe:
        """A bundled recipe by name, or a TOML file."""
        path = Path(name_or_path)
        if path.suffix == ".toml":
            try:
                text = read_text(path)
            except (OSError, ValueError) as error:
                raise RecipeError(f"cannot read the recipe {path}: {error}") from None
        elif str(name_or_path) in recipe_names():
            folder = files("jacobiflow.training") / "recipes"
            text = (folder / f"{name_or_path}.toml").read_text(encoding="utf-8")
        else:
            known = ", ".join(recipe_names())
            raise RecipeError(f"no recipe is called {str(name_or_path)!r}: use a TOML file or {known}")
        try:
            return cls.from_dict(tomllib.loads(text))
        except RecursionError:
            raise RecipeError(f"{name_or_path}: it is nested too deeply") from None
        except ValueError as error:  # a RecordError, or one of tomllib's
            raise RecipeError(f"{name_or_path}: {error}") from None

    @classmethod
    def from_dict(cls, doc: dict[str, Any]) -> Recipe:
        """The recipe of a parsed TOML file."""
        unknown = doc.keys() - {f.name for f in fields(cls)}
        if unknown:
            raise RecipeError(f"a recipe has no table {', '.join(sorted(unknown))!r}")
        model = doc.get("model")
        if not isinstance(model, dict):
            raise RecipeError("a recipe needs a table [model]")
        family = {"tarflow": TarFlowConfig, "maf": MAFConfig}.get(str(model.get("family", "tarflow")))
        if family is None:
            raise RecipeError(f"model.family must be tarflow or maf, not {model.get('family')!r}")
        shape = {k: v for k, v in model.items() if k != "family"}
        target = doc.get("target")
        return cls(
            model=build(family, shape, "model"),
            data=build(DataConfig, doc.get("data", {}), "data"),
            target=None if target is None else parse_target(target),
            training=build(TrainingConfig, doc.get("training", {}), "training"),
            about=str(doc.get("about", "")),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        doc = asdict(self)
        doc["model"]["family"] = "maf" if isinstance(self.model, MAFConfig) else "tarflow"
        if self.target is not None:
            doc["target"] = self.target.to_dict()
        return doc


def recipe_names() -> list[str]:
    """The bundled recipes."""
    folder = files("jacobiflow.training") / "recipes"
    return sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml"))
