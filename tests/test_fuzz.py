"""Every way in, with damaged and hostile files: read right, or refused with the project's own error."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fuzzing
import jacobiflow as jf
from jacobiflow.core.hardware import SizeError
from jacobiflow.data.decoding import DataError
from jacobiflow.data.sources import DataConfig, load_images
from subjects import maf, tarflow
from zygote import Zygote

PATIENCE = 900  # seconds


@pytest.mark.slow
def test_damaged_files_by_the_thousand() -> None:
    ran = subprocess.run(
        [sys.executable, fuzzing.__file__],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    seen = json.loads(ran.stdout)
    for kind, count in fuzzing.COUNTS.items():
        assert seen[f"{kind} refused"] > count / 2
        assert seen[f"{kind} refused"] + seen.get(f"{kind} read", 0) >= count
    assert sum(seen.values()) >= 2000


# A dozen of the worst, through the real command


def config(folder: Path, **changes: Any) -> None:
    doc = json.loads((folder / "config.json").read_text())
    doc["config"] |= changes
    (folder / "config.json").write_text(json.dumps(doc))


def weights(folder: Path, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(data)


def header(folder: Path, doc: Any) -> None:
    text = json.dumps(doc).encode()
    weights(folder, len(text).to_bytes(8, "little") + text)


def replace(folder: Path, name: str, make: Callable[[Path], Any]) -> None:
    (folder / name).unlink()
    make(folder / name)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bombs(folder: Path) -> None:
    """Pictures that claim as many pixels as are allowed, and more, in a few kilobytes."""
    (folder / "pictures").mkdir()
    for side, name in ((6_320, "a.png"), (9_990, "b.png"), (100_000, "c.png")):
        head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0))
        data = chunk(b"IDAT", zlib.compress(bytes(10**7), 9))
        (folder / "pictures" / name).write_bytes(b"\x89PNG\r\n\x1a\n" + head + data + chunk(b"IEND", b""))
    (folder / "recipe.toml").write_text(RECIPE.replace("'data.npz'", "'pictures'\nvalidation = 0"))


def claim(path: Path) -> None:
    """An array without any data."""
    text = repr({"descr": "|u1", "fortran_order": False, "shape": (10**6, 1000, 1000)}).ljust(117) + "\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode())


RECIPE = """
[model]
image_size = 8
image_channels = 1
width = 8
head_dim = 8
blocks = 1
noise_std = 0.1
[data]
source = 'data.npz'
[training]
batch_size = 2
"""
SAMPLE = "sample model -n 2 --format npz --out out"
TRAIN = "train recipe.toml --out run"
WORST: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "a config that never ends": (
        SAMPLE,
        lambda f: replace(f / "model", "config.json", lambda p: p.symlink_to("/dev/zero")),
        "it is not a plain file of at most 16 MiB",
    ),
    "a config that nobody writes": (
        SAMPLE,
        lambda f: replace(f / "model", "config.json", os.mkfifo),
        "it is not a plain file of at most 16 MiB",
    ),
    "a config of 17 megabytes": (
        SAMPLE,
        lambda f: (f / "model/config.json").write_bytes(b" " * 17 * 2**20),
        "it is not a plain file of at most 16 MiB",
    ),
    "a config nested a million deep": (
        SAMPLE,
        lambda f: (f / "model/config.json").write_text("[" * 1_000_000),
        "it is nested too deeply",
    ),
    "a model of 10^30 numbers": (
        SAMPLE,
        lambda f: config(f / "model", width=10**15, head_dim=1),
        "its config says [",
    ),
    "weights with a header of 2^63 bytes": (
        SAMPLE,
        lambda f: weights(f / "model", b"\xff" * 7 + b"\x7f" + b"{}"),
        "cannot read model/model.safetensors",
    ),
    "weights that are not in the file": (
        SAMPLE,
        lambda f: header(f / "model", {"var": {"dtype": "F32", "shape": [4, 4], "data_offsets": [2**40, 2**40 + 64]}}),
        "cannot read model/model.safetensors",
    ),
    "a plan of a million blocks": (
        f"{SAMPLE} --plan plan.json",
        lambda f: (f / "plan.json").write_text(
            '{"format": "jacobiflow-plan", "version": 1, "methods": [' + "{}," * 999_999 + "{}]}"
        ),
        "the plan has 1000000 methods, a flow has at most 10000 blocks",
    ),
    "a recipe nested deep": (
        TRAIN,
        lambda f: (f / "recipe.toml").write_text("x = " + "[" * 100_000),
        "recipe.toml: it is nested too deeply",
    ),
    "a recipe for a model of a petabyte": (
        TRAIN,
        lambda f: (f / "recipe.toml").write_text(RECIPE.replace("width = 8", "width = 8000000")),
        "GB of memory, this machine has",
    ),
    "pictures of 10^8 pixels and more": (
        TRAIN,
        bombs,
        "none of 3 images can be read",
    ),
    "an array that claims a terabyte": (
        TRAIN,
        lambda f: claim(f / "data.npz"),
        "claims a shape of (1000000, 1000, 1000) but its data differs",
    ),
}


@pytest.mark.slow
def test_a_dozen_of_the_worst(tmp_path: Path) -> None:
    """Each is one line, within 5 seconds of processor time and 1 GiB beyond what the command itself takes."""
    assert len(WORST) == 12
    with Zygote(tmp_path / "log") as zygote:
        (plain,) = zygote.wait(zygote.start("models"))
        for name, (command, prepare, words) in WORST.items():
            folder = tmp_path / name
            folder.mkdir()
            small = {"image_size": 4, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}
            tarflow(0.2, **small).save(folder / "model")
            np.savez(folder / "data.npz", x=np.zeros((8, 8, 8), np.uint8))
            (folder / "recipe.toml").write_text(RECIPE)
            prepare(folder)
            (end,) = zygote.wait(zygote.start(*command.split(), cwd=folder))
            said = zygote.log.read_text().splitlines()
            assert (end.status, len(said)) == (2, 1), (name, said)
            assert words in said[0]
            assert end.seconds < 5, name
            assert end.memory < plain.memory + 2**30, name


# Sizes, at the doors of the library


@pytest.mark.parametrize(
    "make",
    [
        lambda: jf.TarFlow(jf.TarFlowConfig(image_size=8, width=10**7, head_dim=1)),
        lambda: jf.TarFlow(jf.TarFlowConfig(image_size=10**200)),
        lambda: jf.MAF(jf.MAFConfig(features=10**7)),
        lambda: jf.MAF(jf.MAFConfig(features=2, blocks=10**9, hidden=(1,))),
        lambda: maf(1.0).sample(10**12),
        lambda: tarflow(0.1).noise(10**300),
    ],
)
def test_what_no_memory_can_hold_is_refused_with_the_number(make: Any) -> None:
    with pytest.raises(SizeError, match=r"takes [\d,]+ GB of memory, this machine has |100,000 tensors"):
        make()


def test_numbers_of_samples_end_somewhere() -> None:
    flow = maf(1.0)
    assert torch.isfinite(flow.noise(1, 0, start=2**63 - 1)).all()
    with pytest.raises(ValueError, match=r"numbered up to 2\^63"):
        flow.noise(2, 0, start=2**63 - 1)


def test_pictures_of_any_size_are_not_made(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 8, 8), np.uint8))
    with pytest.raises(DataError, match=r"the image size must be from 1 to 6,324, not 100000"):
        load_images(DataConfig(source=str(tmp_path / "data.npz")), image_size=100_000)
