"""Jobs with samples that are not finite: they are counted and named, and never a picture."""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import jacobiflow as jf
from jacobiflow.data.local import open_folder
from leftovers import SMALL, files, samples
from subjects import overflowing

FEW = ("-n", 12, "--seed", 0, "--batch", 2, "--shard", 4)


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """A model of 4 x 4 pictures, and the samples of FEW that overflow."""
    flow, folder = overflowing(16), tmp_path_factory.mktemp("bad")
    flow.save(folder)
    lost = [i for i in range(12) if flow.noise(1, 0, start=i)[0, -1] > 0]
    assert 2 < len(lost) < 10
    return folder, lost


@pytest.fixture(scope="module")
def weight(flow: Any) -> float:
    """A guidance weight with which some samples of SMALL overflow, and some do not."""
    model, z, labels = flow[0], flow[0].noise(22, 5), torch.arange(22) % 3
    for value in (10.0 ** torch.arange(1, 6, 0.25)).tolist():
        x = model.decode(z, labels=labels, guidance=value, warn=False).x
        if 2 < (~x.isfinite()).flatten(1).any(1).sum() < 20:
            return float(value)
    raise AssertionError


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(p.read_text()) for p in sorted(out.glob("records/*.json"))]


def named(out: Path) -> list[int]:
    """The samples that the records give as not finite."""
    return [i for record in records(out) for i in record["nonfinite"]]


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_a_shard_keeps_the_index_with_nan(job: Any, bad: Any, tmp_path: Path, format: str) -> None:
    folder, lost = bad
    status, out, err = job(tmp_path, *FEW, "--format", format, model=folder)
    assert status == 1
    assert out.splitlines()[0].endswith(f"{len(lost)} nonfinite")
    assert out.splitlines()[1] == (
        'a nonfinite sample is NaN in its shard; its record in records lists it under "nonfinite"'
    )
    words = f"{len(lost)} of 12 samples are not finite: try float64, or check the weights"
    assert err.splitlines()[-1] == f"jacobiflow sample: {words}"
    assert "warning" not in err
    parts = [load_file(p) if format == "safetensors" else np.load(p) for p in sorted(tmp_path.glob("shards/*"))]
    assert np.concatenate([p["index"] for p in parts]).tolist() == list(range(12))
    x = np.concatenate([p["x"] for p in parts])
    assert np.isnan(x).all(1).nonzero()[0].tolist() == lost
    assert np.isfinite(x).all(1).sum() == 12 - len(lost)
    assert named(tmp_path) == lost
    assert [r["status"].get("NONFINITE", 0) for r in records(tmp_path)] == [
        len([i for i in lost if i // 4 == k]) for k in range(3)
    ]


def test_there_is_no_picture_of_them(job: Any, bad: Any, tmp_path: Path) -> None:
    folder, lost = bad
    status, out, _ = job(tmp_path, *FEW, "--format", "png", model=folder)
    assert status == 1
    assert out.splitlines()[1].startswith("a nonfinite sample has no PNG; its record in records lists it")
    kept = [i for i in range(12) if i not in lost]
    assert sorted(int(p.stem) for p in tmp_path.glob("shards/*/*.png")) == kept
    assert named(tmp_path) == lost
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert sums == {
        f"shards/{i // 4:06d}/{i:09d}.png": hashlib.sha256(
            (tmp_path / f"shards/{i // 4:06d}/{i:09d}.png").read_bytes()
        ).hexdigest()
        for i in kept
    }


def test_labels_stay_with_their_pictures(job: Any, weight: float, tmp_path: Path) -> None:
    flags = (*SMALL, "--guidance", weight)
    assert job(tmp_path / "npz", *flags)[0] == 1
    assert job(tmp_path / "png", *flags, "--format", "png")[0] == 1
    x = samples(tmp_path / "npz")["x"]
    kept = np.isfinite(x).all((1, 2, 3)).nonzero()[0].tolist()
    assert 2 < len(kept) < 20
    rows = []
    for path in sorted(tmp_path.glob("png/shards/*/metadata.csv")):
        with path.open() as f:
            rows += [(row["file_name"], int(row["label"])) for row in csv.DictReader(f)]
    assert rows == [(f"{i:09d}.png", i % 3) for i in kept]
    pictures, _ = open_folder(tmp_path / "png/shards")  # as training and evaluation read them
    assert [p.name for p in pictures.paths] == [name for name, _ in rows]


@pytest.mark.parametrize("format", ["npz", "png"])
def test_a_finished_job_still_fails_and_makes_nothing_again(job: Any, bad: Any, tmp_path: Path, format: str) -> None:
    folder, lost = bad
    assert job(tmp_path, *FEW, "--format", format, model=folder)[0] == 1
    before = {p: p.stat().st_mtime_ns for place in ("shards", "records") for p in (tmp_path / place).rglob("*")}
    for _ in range(2):
        status, out, err = job(tmp_path, *FEW, "--format", format, "--json", model=folder)
        doc = json.loads(out)
        assert (status, doc["made"], doc["nonfinite"]) == (1, 0, len(lost))
        assert doc["status"]["NONFINITE"] == len(lost)
        assert f"{len(lost)} of 12 samples are not finite" in err
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_a_picture_that_should_not_be_there_goes(job: Any, bad: Any, tmp_path: Path) -> None:
    folder, lost = bad
    flags = (*FEW, "--format", "png")
    assert job(tmp_path, *flags, model=folder)[0] == 1
    whole = files(tmp_path)
    place = tmp_path / f"shards/{lost[0] // 4:06d}"
    shutil.copy(next(place.glob("*.png"), next(tmp_path.glob("shards/*/*.png"))), place / f"{lost[0]:09d}.png")
    status, out, _ = job(tmp_path, *flags, model=folder)
    assert (status, "1 made now" in out) == (1, True)
    assert files(tmp_path) == whole


def test_a_shard_without_any_picture(job: Any, tmp_path: Path) -> None:
    flow = overflowing(16)
    with torch.no_grad():
        flow.blocks[1].head.bias[:] = 1e6
    flow.save(tmp_path / "model")
    out = tmp_path / "out"
    assert job(out, *FEW, "--format", "png", model=tmp_path / "model")[0] == 1
    assert not list(out.glob("shards/*"))
    assert named(out) == list(range(12))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "000000000.png").touch()
    (out / "shards/000000").symlink_to(elsewhere)  # a job removes nothing outside of its folder
    status, _, err = job(out, *FEW, "--format", "png", model=tmp_path / "model")
    assert status == 2
    assert "is a link, and a job writes into its own folder only" in err
    assert (elsewhere / "000000000.png").exists()


def test_denoising_that_overflows_counts(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denoise(self: Any, x: torch.Tensor, labels: Any = None) -> torch.Tensor:
        return torch.where(torch.arange(len(x)).view(-1, 1, 1, 1) == 1, torch.inf, x)

    monkeypatch.setattr(jf.TarFlow, "denoise", denoise)
    status, out, _ = job(tmp_path, *SMALL, "--denoise", "--json")
    assert (status, json.loads(out)["nonfinite"]) == (1, 6)
    assert json.loads(out)["status"] == {"EXACT": 16, "NONFINITE": 6}
    assert named(tmp_path) == [1, 5, 9, 13, 17, 21]
    assert np.isnan(samples(tmp_path)["x"]).all((1, 2, 3)).nonzero()[0].tolist() == named(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"nonfinite": []},
        {"nonfinite": [0, 0, 1, 1, 2, 2]},
        {"nonfinite": [99]},
        {"nonfinite": ["a"]},
        {"nonfinite": [[0]]},
        {"nonfinite": 3},
    ],
    ids=str,
)
def test_a_record_that_counts_wrongly_is_made_again(job: Any, bad: Any, tmp_path: Path, change: Any) -> None:
    folder, _ = bad
    assert job(tmp_path, *FEW, "--format", "png", model=folder)[0] == 1
    before = files(tmp_path)
    path = next(p for p in sorted(tmp_path.glob("records/*.json")) if json.loads(p.read_text())["nonfinite"])
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    status, out, _ = job(tmp_path, *FEW, "--format", "png", model=folder)
    assert (status, "1 made now" in out) == (1, True)
    assert files(tmp_path) == before


def test_the_probe_of_memory_does_not_warn(job: Any, bad: Any, tmp_path: Path) -> None:
    """A warning is an error here; `--batch auto` decodes a few samples to see what they take."""
    status, _, err = job(tmp_path, "-n", 12, "--format", "npz", model=bad[0])
    assert (status, "warning" in err) == (1, False)
