"""Recipe: model, data and training in one record, the same in TOML files, in Python and as flags."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_args

import torch

from jacobiflow.core.files import read_text
from jacobiflow.core.records import RecordError, build
from jacobiflow.core.rows import Noise
from jacobiflow.core.tables import did_you_mean
from jacobiflow.data.decoding import DataError
from jacobiflow.data.sources import DataConfig, Survey, survey
from jacobiflow.flows.families import family_of, find_family, recipe_files
from jacobiflow.flows.tarflow import TarFlowConfig

# What the fields of TrainingConfig must be: a rule, when it holds, and the fields.
RULES: tuple[tuple[str, Callable[[float], bool], tuple[str, ...]], ...] = (
    ("1 or more", lambda v: v >= 1, ("batch_size", "accumulate", "log_every", "save_every")),
    ("positive", lambda v: 0 < v < math.inf, ("epochs", "lr")),
    ("1e+09 or less", lambda v: v <= 1e9, ("epochs",)),
    ("1e+30 or less", lambda v: v <= 1e30, ("lr", "final_lr", "weight_decay")),
    (
        "0 or more",
        lambda v: 0 <= v < math.inf,
        ("final_lr", "warmup_epochs", "weight_decay", "clip", "tol", "contrast"),
    ),
    ("0 or more", lambda v: v >= 0, ("seed", "sample_every", "keep_every", "validate")),
    ("below 2^63", lambda v: v < 2**63, ("seed",)),
    ("in [0, 1)", lambda v: 0 <= v < 1, ("label_drop", "ema", "betas")),
)


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """The training loop: noise, optimizer, and what is written when."""

    start: str = ""  # Folder or name of a flow of the same shape, whose weights a new run begins with.
    epochs: float = 10.0  # Passes over the training images; without data, of 100 steps each.
    batch_size: int = 256  # Images per step, over all processes and accumulation steps.
    accumulate: int = 1  # Parts into which a process splits its batch, to save memory.
    lr: float = 1e-4  # Learning rate after the warm-up.
    final_lr: float = 1e-6  # Learning rate at the end of the cosine.
    warmup_epochs: float = 1.0  # Epochs of linear warm-up.
    betas: tuple[float, float] = (0.9, 0.95)  # Betas of AdamW.
    weight_decay: float = 1e-4  # Weight decay of AdamW.
    clip: float = 0.0  # Largest norm of the gradient; 0: no limit.
    noise: Noise = "gaussian"  # Added to the images: gaussian with model.noise_std; the others are uniform.
    tol: float = 1e-4  # Of the sweeps that draw samples, for losses of samples. Loose ones bias gradients.
    label_drop: float = 0.0  # Share of labels that are dropped, so that the model also learns without.
    contrast: float = 0.0  # Weight of a loss, on half of each batch, that tells a label from a wrong one.
    flip: bool = False  # Mirror each image with probability 1/2.
    ema: float = 0.0  # Decay of averaged weights, smaller in early steps; they are the result. 0: no average.
    seed: int = 0  # Seed of initial weights, data order, noise, flips and dropped labels.
    bf16: bool | None = None  # Compute in bfloat16 where that is safe; default: on CUDA, not on CPUs.
    compile: bool = False  # Use torch.compile: it starts slowly, then steps are faster.
    tensorboard: bool = False  # Also write TensorBoard logs.
    log_every: int = 50  # Steps between lines of the log.
    save_every: int = 500  # Steps between saved states, from which a run resumes.
    keep_every: int = 0  # Steps between checkpoints in kept/; 0: none.
    sample_every: int = 2000  # Steps between sample grids; 0: none.
    validate: int = 1000  # Validation images (without data, samples) looked at every epoch; 0: none.

    def __post_init__(self) -> None:
        for rule, holds, names in RULES:
            for name in names:
                value = getattr(self, name)
                if not all(map(holds, value if isinstance(value, tuple) else [value])):
                    raise RecordError(f"training.{name} must be {rule}, not {value}")
        if self.noise not in get_args(Noise):
            raise RecordError(f"training.noise must be {' or '.join(get_args(Noise))}, not {self.noise!r}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `jacobiflow train` needs to know."""

    model: Any  # the config of a family
    data: DataConfig = field(default_factory=DataConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    about: str = ""

    def __post_init__(self) -> None:
        family, std, noise = family_of(self.model), getattr(self.model, "noise_std", 0.0), self.training.noise
        if family.trains_on_noise and self.data.source:
            raise RecordError(f"a {family.family} flow learns without data: leave data.source empty")
        if noise == "gaussian" and not std and not family.trains_on_noise:
            raise RecordError("training.noise gaussian needs a model with a noise_std above 0: set it or other noise")
        if noise != "gaussian" and std:
            raise RecordError(f"model.noise_std {std} is for training.noise gaussian, not {noise}: set it to 0")

    @classmethod
    def load(cls, name_or_path: str | Path) -> Recipe:
        """A bundled recipe by name, or a TOML file."""
        name, bundled = str(name_or_path), recipe_files()
        if not name.endswith(".toml") and name not in bundled:
            hint = did_you_mean(name, recipe_names())
            raise RecordError(f"no recipe is called {name!r}{hint}: use a TOML file or {', '.join(recipe_names())}")
        try:
            text = bundled[name].read_text(encoding="utf-8") if name in bundled else read_text(Path(name))
            return cls.from_dict(tomllib.loads(text))
        except (OSError, ValueError, RecursionError) as error:
            why = "it is nested too deeply" if isinstance(error, RecursionError) else error
            raise RecordError(f"cannot read the recipe {name}: {why}") from None

    @classmethod
    def from_dict(cls, doc: dict[str, Any]) -> Recipe:
        """The recipe of a parsed TOML file."""
        if unknown := doc.keys() - {f.name for f in fields(cls)}:
            raise RecordError(f"a recipe has no table {', '.join(sorted(unknown))!r}")
        if not isinstance(doc.get("model"), dict):
            raise RecordError("a recipe needs a table [model]")
        model = dict(doc["model"])
        family = find_family(model.pop("family", "tarflow"))
        return cls(
            model=build(family.config_type, model, "model"),
            data=build(DataConfig, doc.get("data", {}), "data"),
            training=build(TrainingConfig, doc.get("training", {}), "training"),
            about=str(doc.get("about", "")),
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data that `from_dict` reads."""
        return asdict(self) | {"model": {"family": family_of(self.model).family, **asdict(self.model)}}


def recipe_names() -> list[str]:
    """The bundled recipes."""
    return sorted(recipe_files())


MAX_SIDE = 64  # larger images take more than small models and a CPU can give
MAX_EPOCHS = 300  # few images are learned by heart sooner
MAX_PATCHES = {"cpu": 8, "cuda": 16}  # per side
STEPS = {"cpu": 4000, "cuda": 50_000}  # on two cores, an hour or less


def recipe_for(source: str, device: torch.device) -> tuple[Recipe, Survey]:
    """A recipe for one's own images, and what they are; they decide the model, and with the machine the training."""
    config, cuda = DataConfig(source=source), device.type == "cuda"
    data, kind = survey(config), "cuda" if cuda else "cpu"
    if data.count < 4:
        raise DataError(f"{source} holds {data.count} images: training needs 4 or more")
    batch = min(64, data.count // 2)
    side, patch = image_side(data.side, MAX_PATCHES[kind])
    model = TarFlowConfig(
        image_size=side,
        image_channels=data.channels,
        patch_size=patch,
        width=256 if cuda else 128,
        blocks=6,
        layers_per_block=4 if cuda else 2,
        num_classes=data.classes,
        noise_std=0.1 if side <= 32 else 0.07,
    )
    training = TrainingConfig(
        epochs=min(max(1, round(STEPS[kind] * batch / data.count)), MAX_EPOCHS),
        batch_size=batch,
        lr=3e-4 if cuda else 1e-3,
        clip=1.0,
        ema=0.999,
        label_drop=0.1 if data.classes else 0.0,
        save_every=100,
    )
    return Recipe(model=model, data=config, training=training), data


def image_side(median: int, most: int) -> tuple[int, int]:
    """The side that images get, and the patch that divides it into at most `most` per side.

    >>> [image_side(side, 16) for side in (28, 32, 64, 37, 500)]
    [(28, 2), (32, 2), (64, 4), (36, 3), (64, 4)]
    """
    if median < 2:
        raise DataError(f"the shorter sides of the images are {median} pixels (median): give larger images")
    patch = math.ceil(min(median, MAX_SIDE) / most)
    return min(median, MAX_SIDE) // patch * patch, patch


def image_form(model: Any) -> tuple[int, int, int]:
    """The side, the channels and the number of classes of the images that a model of this config takes."""
    if isinstance(model, TarFlowConfig):
        return model.image_size, model.image_channels, model.num_classes
    if model.context:
        raise RecordError(f"images bring no context: set model.context to 0, not {model.context}")
    if (side := math.isqrt(model.features)) ** 2 != model.features:
        raise RecordError(f"model.features {model.features} is no square: there are no grey images of so many pixels")
    return side, 1, 0


def said_of_images(recipe: Recipe, data: Survey) -> list[str]:
    """What the images of a recipe are, and what of them its model takes, in lines."""
    count, named, model = image_form(recipe.model)[2], data.names, recipe.model
    classes = f"{count} classes" if count else "no classes" if not data.classes else "classes not used"
    if count and len(named) == count:
        classes += f" ({', '.join(named[:8])}{', ...' if len(named) > 8 else ''})"
    lines = [f"{data.count:,} images, {data}, {classes}", conversion(recipe, data)]
    if isinstance(model, TarFlowConfig):
        shape = f"patches of {model.patch_size} x {model.patch_size}, {model.length} positions"
        lines.append(f"model: {shape}, {model.blocks} blocks of width {model.width}")
    return [line for line in lines if line]


def conversion(recipe: Recipe, data: Survey) -> str:
    """How images are changed to fit the model, in words; "" if they are not."""
    side, channels, _ = image_form(recipe.model)
    done = []
    if data.sizes != ((side, side),):
        words = {"crop": "cropped to squares and resized", "stretch": "stretched", "pad": "padded and resized"}
        how = words[recipe.data.fit] if any(w != h for w, h in data.sizes) else "resized"
        done.append(f"{how} to {side} x {side} (see --data.fit)")
    if channels != data.channels:
        done.append("turned grey" if channels == 1 else "stored as colour")
    return f"images are {' and '.join(done)}" if done else ""
