"""Recipes: files, flags and dataclasses are the same thing, and the bundled ones are what they claim."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from jacobiflow.cli import train as command
from jacobiflow.cli.main import main
from jacobiflow.core.records import RecordError
from jacobiflow.data.sources import DataConfig
from jacobiflow.flows.families import recipe_files
from jacobiflow.flows.maf import MAFConfig
from jacobiflow.flows.tarflow import TarFlowConfig
from jacobiflow.training.recipe import Recipe, TrainingConfig, recipe_names
from jacobiflow.training.train import build_flow

PAPER_SCALE = {  # size, patch, blocks, layers, width: the paper's table, for ImageNet the public TarFlow's
    "cifar10-paper": (32, 2, 6, 6, 256),
    "cifar100-paper": (32, 2, 6, 6, 256),
    "afhq256": (256, 8, 8, 8, 768),
    "imagenet64": (64, 2, 8, 8, 768),
}
CPU_SCALE = {
    *("mnist", "cifar10", "mnist-cpu", "cifar10-cpu", "cifar100-cpu", "afhq-cat64-cpu", "mnist-maf"),
    *("ising", "ising-maf"),
}


def test_what_is_bundled():
    assert set(recipe_names()) == PAPER_SCALE.keys() | CPU_SCALE


@pytest.mark.parametrize("name", recipe_names())
def test_a_bundled_recipe_builds(name):
    recipe = Recipe.load(name)
    assert recipe.about.endswith(".")
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    with torch.device("meta" if name in PAPER_SCALE else "cpu"):
        flow = build_flow(recipe.model)
    assert {k: tuple(v.shape) for k, v in flow.state_dict().items()} == dict(recipe.model.shapes())
    if name in CPU_SCALE:
        assert sum(p.numel() for p in flow.parameters()) < 20e6


@pytest.mark.parametrize("name", PAPER_SCALE)
def test_paper_scale(name):
    model, training = Recipe.load(name).model, Recipe.load(name).training
    assert isinstance(model, TarFlowConfig)
    shape = (model.image_size, model.patch_size, model.blocks, model.layers_per_block, model.width)
    assert shape == PAPER_SCALE[name]
    assert (model.image_channels, model.head_dim, model.volume_preserving) == (3, 64, False)
    assert model.length == (256 if name.startswith("cifar") else 1024)
    assert (training.betas, training.weight_decay) == ((0.9, 0.95), 1e-4)
    assert (training.batch_size, training.warmup_epochs, training.final_lr) == (256, 1, 1e-6)
    assert (training.label_drop, training.flip, training.noise) == (0.1, True, "gaussian")
    assert training.clip == training.ema == 0


@pytest.mark.parametrize(
    ("name", "classes", "noise_std", "lr", "epochs"),
    [("afhq256", 3, 0.07, 1e-4, 4000), ("imagenet64", 1000, 0.05, 1e-4, 200)],
)
def test_public_settings(name, classes, noise_std, lr, epochs):
    model, training = Recipe.load(name).model, Recipe.load(name).training
    assert (model.num_classes, model.noise_std) == (classes, noise_std)
    assert (training.lr, training.epochs) == (lr, epochs)


@pytest.mark.parametrize("name", recipe_names())
def test_what_is_ours_is_marked(name):
    assert "our choice" in recipe_files()[name].read_text()


def test_the_likelihood_model_of_imagenet(monkeypatch):
    text = recipe_files()["imagenet64"].read_text()
    flags = " ".join(line.strip("# .") for line in text.splitlines() if "--" in line).partition("--")
    recipe = captured(monkeypatch, "imagenet64", ("--" + flags[2]).split())
    assert (recipe.training.noise, recipe.training.epochs) == ("dequantize", 100)
    assert (recipe.model.noise_std, recipe.model.num_classes) == (0, 0)


def captured(monkeypatch: pytest.MonkeyPatch, name: str, flags: list[str]) -> Recipe:
    """The recipe that the command would run."""
    seen: list[Recipe] = []
    monkeypatch.setattr(command, "train", lambda recipe, *_, **__: seen.append(recipe))
    assert main(["train", name, *flags]) == 0
    return seen[0]


OTHER = {
    TarFlowConfig: {
        "image_size": 6,
        "image_channels": 1,
        "patch_size": 3,
        "width": 48,
        "blocks": 3,
        "layers_per_block": 5,
        "head_dim": 24,
        "num_classes": 4,
        "volume_preserving": True,
        "noise_std": 0.25,
        "noise": "gaussian",
        "class_names": ("a", "b", "c", "d"),
    },
    MAFConfig: {
        "features": 9,
        "context": 2,
        "blocks": 3,
        "hidden": (8, 8, 8),
        "transform": "spline",
        "residual": True,
        "activation": "gelu",
        "scale": "exp",
        "min_scale": 0.125,
        "order": "random",
        "order_seed": 5,
        "bins": 4,
        "bound": 2.5,
        "noise": "binary",
    },
    DataConfig: {
        "source": "elsewhere",
        "validation": 0.25,
        "split_seed": 3,
        "limit": 40,
        "fit": "pad",
        "image_column": "picture",
        "label_column": "kind",
        "subset": "small",
        "revision": "v2",
    },
    TrainingConfig: {
        "epochs": 1.5,
        "batch_size": 6,
        "accumulate": 3,
        "lr": 0.5,
        "final_lr": 0.125,
        "warmup_epochs": 0.25,
        "betas": (0.5, 0.75),
        "weight_decay": 0.0,
        "clip": 2.0,
        "noise": "gaussian",
        "tol": 0.125,
        "label_drop": 0.5,
        "contrast": 0.25,
        "flip": True,
        "ema": 0.5,
        "seed": 9,
        "bf16": False,
        "compile": True,
        "tensorboard": True,
        "log_every": 3,
        "save_every": 4,
        "keep_every": 5,
        "sample_every": 6,
        "validate": 7,
        "start": "runs/first",
    },
}


def as_flags(table: str, values: dict[str, Any]) -> list[str]:
    found = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool) and name != "bf16":  # it has a third value, None
            found.append(f"--{table}.{flag}" if value else f"--{table}.no-{flag}")
        else:
            found += [f"--{table}.{flag}", *map(str, value if isinstance(value, tuple) else [value])]
    return found


@pytest.mark.parametrize(
    ("name", "family", "noise"), [("mnist-cpu", TarFlowConfig, "gaussian"), ("mnist-maf", MAFConfig, "none")]
)
def test_every_field_is_a_flag(monkeypatch, name, family, noise):
    tables = {"model": family, "data": DataConfig, "training": TrainingConfig}
    values = {table: dict(OTHER[kind]) for table, kind in tables.items()}
    values["training"]["noise"] = noise
    for table, kind in tables.items():
        assert values[table].keys() == {f.name for f in fields(kind)}
    flags = [flag for table, found in values.items() for flag in as_flags(table, found)]
    recipe = captured(monkeypatch, name, flags)
    for table, kind in tables.items():
        assert getattr(recipe, table) == kind(**values[table])


def test_what_no_flag_names_stays_as_in_the_file(monkeypatch):
    before = Recipe.load("cifar100-cpu")
    after = captured(monkeypatch, "cifar100-cpu", ["--training.lr", "0.25"])
    assert after == replace(before, training=replace(before.training, lr=0.25))


GOOD = """
[model]
image_size = 8
noise_std = 0.1
[data]
source = "x.npz"
[training]
lr = 1
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("lr = 1", "learning_rate = 1", "training has no field 'learning_rate'"),
        ("lr = 1", "lr = 'fast'", "training.lr must be float, not 'fast'"),
        ("lr = 1", "lr = true", "training.lr must be float, not True"),
        ("lr = 1", "batch_size = 2.5", "training.batch_size must be int"),
        ("lr = 1", "betas = [0.9]", "training.betas must be"),
        ("lr = 1", "noise = 'pink'", "training.noise must be 'gaussian' or"),
        ("lr = 1", "lr = nan", "training.lr must be positive"),
        ("lr = 1", "epochs = 0", "training.epochs must be positive"),
        ("lr = 1", "clip = -1", "training.clip must be 0 or more"),
        ("lr = 1", "ema = 1", "training.ema must be in [0, 1)"),
        ("lr = 1", "seed = -1", "training.seed must be 0 or more"),
        ("lr = 1", "accumulate = 0", "training.accumulate must be 1 or more"),
        ("lr = 1", "epochs = 1e300", "training.epochs must be 1e+09 or less"),
        ("lr = 1", "lr = 1e308", "training.lr must be 1e+30 or less"),
        ("lr = 1", "weight_decay = inf", "training.weight_decay must be"),
        ("lr = 1", "betas = [0.9, 1.0]", "training.betas must be in [0, 1), not (0.9, 1.0)"),
        ("lr = 1", "seed = 9223372036854775808", "training.seed must be below 2^63"),
        ("[data]", "[data]\nsplit_seed = 9223372036854775808", "data.split_seed must be below 2^63"),
        ("lr = 1", "lr = ", "Invalid value"),
        ("lr = 1", "noise = 'dequantize'", "model.noise_std 0.1 is for training.noise gaussian"),
        ("noise_std = 0.1", "", "training.noise gaussian needs a model with a noise_std above 0"),
        ("image_size = 8", "image_size = 7", "patch_size 4 does not divide image_size 7"),
        ("image_size = 8", "", "model needs a field 'image_size'"),
        ("image_size = 8", "image_size = 8\nfamily = []", "family must be one of tarflow, maf, "),
        ("image_size = 8", "image_size = 8\nfamily = 'glow'", "family must be one of tarflow, maf, "),
        ("[data]", "[date]", "a recipe has no table 'date'"),
        ("[model]", "[[model]]", "a recipe needs a table [model]"),
        ('source = "x.npz"', "source = 3", "data.source must be str, not 3"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, refusal, old, new, words):
    path = tmp_path / "wrong.toml"
    path.write_text(GOOD)
    assert Recipe.load(path).training.lr == 1
    path.write_text(GOOD.replace(old, new))
    line = refusal(recipe=path)
    assert line.startswith(f"cannot read the recipe {path}: ")
    assert words in line


def test_recipes_that_are_not_there(tmp_path, refusal):
    assert "no recipe is called 'minst' (did you mean mnist?): use a TOML file or afhq-cat64-cpu, " in refusal(
        recipe="minst"
    )
    assert "cannot read the recipe" in refusal(recipe=tmp_path / "gone.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    assert "cannot read the recipe" in refusal(recipe=tmp_path / "bytes.toml")
    (tmp_path / "folder.toml").mkdir()
    assert "cannot read the recipe" in refusal(recipe=tmp_path / "folder.toml")


def test_the_api_checks_what_the_file_does():
    with pytest.raises(RecordError, match="noise must be gaussian or"):
        TrainingConfig(noise="pink")
    with pytest.raises(TypeError, match="learning_rate"):
        TrainingConfig(learning_rate=1.0)


@pytest.mark.parametrize(("name", "kind"), [("mnist-cpu", TarFlowConfig), ("mnist-maf", MAFConfig)])
def test_help_of_the_model(monkeypatch, capsys, name, kind):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", name, "--help"]) == 0
    text = capsys.readouterr().out
    options = dict(re.findall(r"^  --model\.([\w-]+)[^\n]*\n((?: {8}.*\n)+)", text, re.MULTILINE))
    for field in fields(kind):
        said = " ".join(options[field.name.replace("_", "-")].split()).partition("(default")[0].strip()
        assert re.fullmatch(r"\w.{10,}\.", said), field.name


def test_help(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["train", "mnist-cpu", "--help"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "example: jacobiflow train mnist-cpu --data.source mnist.npz --training.epochs 2" in text
    words = " ".join(text.replace("│", " ").split())
    assert "--training.batch-size INT Images per step, over all processes and accumulation steps." in words
    for field in fields(TrainingConfig):
        _, found, rest = words.partition(f"--training.{field.name.replace('_', '-')}")
        assert found
        assert not rest.partition(" --training.")[0].strip().startswith("(default")
        assert rest.partition("(default")[0].rstrip().endswith(".")
    assert main(["train", "--help"]) == main(["train"]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert all(name in text for name in recipe_names())
    assert "torchrun" in text
