"""`jacobiflow convert`: a public checkpoint becomes a folder that `jacobiflow sample` takes."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import jacobiflow as jf
from jacobiflow.adapters import tarflow_checkpoint
from jacobiflow.adapters.tarflow_checkpoint import RENAMED
from subjects import tarflow

NAME = "toy_model_2_64_2_1_0.07"


def toy(**options: Any) -> jf.Flow:
    shape = {"image_size": 4, "width": 64, "head_dim": 64, "blocks": 2, "layers_per_block": 1}
    return tarflow(0.2, **(shape | {"num_classes": 3, "noise_std": 0.07} | options)).eval()


def public(flow: jf.Flow) -> dict[str, Tensor]:
    """The flow's weights in the public layout."""
    found = {}
    for ours, value in flow.state_dict().items():
        theirs = ours
        for our_part, their_part in RENAMED.items():
            theirs = theirs.replace(our_part, their_part)
        if ours.endswith("class_embed"):
            value = value[:, None]
        elif ours == "blocks.1.pos_embed":
            value = value.flip(0)
        found[theirs] = value.contiguous()
    return found


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_a_public_checkpoint_can_be_sampled(run: Any, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    flow = toy()
    (torch.save if suffix == "pth" else save_file)(public(flow), f"{NAME}.{suffix}")
    ran = run("convert", f"{NAME}.{suffix}", "a/model", "--channels", 1)
    assert ran.status == 0
    assert "measuring profile, block 2 of 2\n" in ran.err
    count = sum(p.numel() for p in flow.parameters())
    assert ran.out == (
        f"a/model: {count:,} parameters, 2 blocks of 1 layers, 4x4x1, noise 0.07\n"
        "try: jacobiflow sample a/model -n 4 --out samples\n"
    )
    again = jf.load("a/model")
    assert again.config == flow.config
    assert all(torch.equal(again.state_dict()[k], v) for k, v in flow.state_dict().items())

    tried = ran.out.partition("try: jacobiflow ")[2].split()
    assert run(*tried, "--labels", 1, "--plan", "sequential").status == 0
    with np.load("samples/samples.npz") as file:
        want = flow.decode(flow.noise(4, 0), "sequential", labels=1).x.numpy()
        assert np.array_equal(file["x"], want)


def test_noise_is_given_or_in_the_name(run: Any) -> None:
    save_file(public(toy()), f"{NAME}.safetensors")
    save_file(public(toy()), "other.safetensors")
    for file, extra, want in (
        (NAME, [], 0.07),
        (NAME, ["--noise-std", 0.2], 0.2),
        ("other", [], 0.0),
        ("other", ["--noise-std", 0.1], 0.1),
    ):
        ran = run("convert", f"{file}.safetensors", "model", "--channels", 1, *extra, "--json", "--force")
        doc = json.loads(ran.out)
        assert doc["config"]["noise_std"] == want
        assert doc["out"] == "model"
        assert doc["config"] == json.loads(json.dumps(asdict(jf.load("model").config)))
        assert doc["parameters"] == sum(p.numel() for p in toy().parameters())


class Evil:
    def __reduce__(self) -> Any:
        return (Path("owned").write_text, ("x",))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("missing.pth model", "missing.pth: there is no such file"),
        ("folder.pth model", "folder.pth: is a folder"),
        ("notes.txt model", "notes.txt: a checkpoint is a .pth, .pt or .safetensors file"),
        ("damaged.pth model", "damaged.pth: damaged, truncated or not in the format of .pth files"),
        ("damaged.safetensors model", "damaged.safetensors: damaged, truncated"),
        ("evil.pth model", "evil.pth: "),
        ("objects.pth model", "objects.pth: holds Python objects beside tensors"),
        ("good.safetensors model", "pass the image_channels of the training data"),
        ("good.safetensors model --channels 0", "image_channels must be 1 or more, not 0"),
        ("good.safetensors model --channels 1 --noise-std -1", "noise_std must be finite and not negative"),
        (
            "toy_2_64_3_1_0.07.safetensors model --channels 1",
            "states blocks 3, the weights have 2",
        ),
        ("short.safetensors model --channels 1", "blocks.1.proj_out.bias is missing"),
        ("good.safetensors notes.txt --channels 1", "notes.txt is a file: give a folder"),
        ("good.safetensors notes.txt/model --channels 1", "notes.txt/model cannot be made: Not a directory"),
    ],
)
def test_mistakes_are_one_line(run: Any, args: str, words: str) -> None:
    weights = public(toy())
    Path("folder.pth").mkdir()
    Path("notes.txt").write_text("mine")
    for name in ("damaged.pth", "damaged.safetensors"):
        Path(name).write_bytes(b"PK\x03\x04 and so on")
    Path("evil.pth").write_bytes(pickle.dumps(Evil()))
    torch.save({"model": weights, "odd": Evil()}, "objects.pth")
    for name in ("good", "toy_2_64_3_1_0.07"):
        save_file(weights, f"{name}.safetensors")
    save_file({k: v for k, v in weights.items() if k != "blocks.1.proj_out.bias"}, "short.safetensors")
    text = run("convert", *args.split()).complaint
    assert text.startswith("jacobiflow convert: ")
    assert words in text
    assert not Path("model").exists()
    assert not Path("owned").exists()
    assert Path("notes.txt").read_text() == "mine"


def test_an_old_torch_is_told_to_upgrade(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save(public(toy()), "a.pth")
    monkeypatch.setattr(tarflow_checkpoint, "SAFE_TORCH", "99")
    assert "upgrade to torch 99 or newer" in run("convert", "a.pth", "model", "--channels", 1).complaint
