"""Shards are bound to their job: those of another one are neither taken for its own nor overwritten."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jacobiflow as jf
from jacobiflow.jobs import manifest
from leftovers import SMALL, files, samples
from subjects import overflowing, tarflow


def as_version_1(out: Path) -> None:
    """The folder as version 0.1 wrote it: no digests, and no list of samples that are not finite."""
    path = out / "manifest.json"
    doc = json.loads(path.read_text()) | {"version": 1}
    doc["plan"]["version"] = 1
    del doc["digest"], doc["checksum"]
    path.write_text(json.dumps(doc | {"checksum": manifest._checksum(doc)}, indent=2) + "\n")
    for path in out.glob("records/*.json"):
        doc = json.loads(path.read_text())
        del doc["job"], doc["nonfinite"]
        path.write_text(json.dumps(doc, indent=1) + "\n")


OTHER: dict[str, tuple[object, ...]] = {
    "seed": ("--seed", 6),
    "n": ("-n", 30),
    "fewer": ("-n", 8),
    "labels": ("--labels", "1"),
    "no labels": ("--labels", "none"),
    "plan": ("--plan", "uniform"),
    "tol": ("--tol", "0.25"),
    "init": ("--init", "zeros"),
    "guidance": ("--guidance", "1"),
    "guide": ("--guidance", "1", "--guide", "a"),
    "annealed": ("--guidance", "1", "--annealed"),
    "attn_temp": ("--guidance", "1", "--attn-temp", "2"),
    "denoise": ("--denoise",),
    "format": ("--format", "safetensors"),
    "pictures": ("--format", "png"),
    "batch": ("--batch", 8),
    "shard": ("--shard", 4),
}


@pytest.mark.parametrize("kind", OTHER)
def test_shards_without_their_manifest_are_not_taken_over(job: Any, copy: Path, kind: str) -> None:
    (copy / "manifest.json").unlink()
    before = files(copy)
    status, out, err = job(copy, *SMALL, *OTHER[kind])
    line = f"{copy} has no manifest.json, and records/000000.json is not of this job"
    assert (status, out, err) == (
        2,
        "",
        f"jacobiflow sample: {line}: restore the manifest.json of its job, or use a new --out\n",
    )
    assert files(copy) == before


def test_neither_are_those_of_another_model(job: Any, copy: Path, tmp_path: Path) -> None:
    (copy / "manifest.json").unlink()
    before = files(copy)
    tarflow(0.25, seed=1, num_classes=3).save(tmp_path / "other")
    status, _, err = job(copy, *SMALL, model=tmp_path / "other")
    assert (status, "is not of this job" in err) == (2, True)
    assert files(copy) == before


def test_every_digest_differs(flow: Any) -> None:
    """Each field by itself; what else is asked for has an effect only through what it became."""
    settings = manifest.Settings(n=10, guidance=1.0)
    given: dict[str, Any] = {"model": "a", "plan": jf.Plan((jf.Method(),)), "batch": 2, "shard": 4}
    given |= {"settings": settings, "weights": "w", "dtype": "float32", "versions": {}}
    changed: list[dict[str, Any]] = [
        {},
        {"plan": jf.Plan((jf.Method(width=1),))},
        {"plan": jf.Plan((jf.Method(tol=0.5),))},
        {"batch": 1},
        {"shard": 2},
        {"weights": "v"},
        {"dtype": "float64"},
    ]
    others = {"n": 11, "seed": 1, "labels": (1,), "guidance": 2.0, "guide": "a", "annealed": True}
    others |= {"attn_temp": 2.0, "denoise": True, "format": "png", "device": "cuda", "threads": 2}
    changed += [{"settings": replace(settings, **{k: v})} for k, v in others.items()]
    digests = [manifest.Job(**given | change).signed().digest for change in changed]
    assert len(set(digests)) == len(digests)
    unresolved = replace(settings, plan="uniform", tol=0.1, init="zeros", batch=2, shard=4)
    same = given | {"settings": unresolved, "model": "b", "versions": {"torch": "9"}, "revision": "c"}
    assert manifest.Job(**same).signed().digest == digests[0]


def test_the_same_job_goes_on_without_its_manifest(job: Any, whole: Path, copy: Path) -> None:
    (copy / "manifest.json").unlink()
    (copy / "shards/000001.npz").unlink()
    (copy / "records/000001.json").unlink()
    status, out, _ = job(copy, *SMALL)
    assert (status, "1 made now" in out) == (0, True)
    assert files(copy) == files(whole)


@pytest.mark.parametrize("name", ["shards/000001.npz", "shards/notes.txt", "records/000009.json", "records/x"])
def test_a_new_job_overwrites_nothing_that_it_does_not_know(job: Any, whole: Path, tmp_path: Path, name: str) -> None:
    """Not even a file without a record."""
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    status, _, err = job(tmp_path / "out", *SMALL)
    assert (status, f"and {name} is not of this job: " in err) == (2, True)
    assert path.read_text() == "mine"


def test_shards_that_were_moved_here_from_another_job(job: Any, copy: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert job(other, *SMALL, "--seed", 6)[0] == 0
    for name in ("shards/000001.npz", "records/000001.json"):
        shutil.copy(other / name, copy / name)
    before = files(copy)
    status, _, err = job(copy, *SMALL)
    line = f"{copy}/records/000001.json is of another job: move it away with its shard, or use a new --out"
    assert (status, err) == (2, f"jacobiflow sample: {line}\n")
    assert files(copy) == before
    (copy / "records/000001.json").unlink()
    assert "1 made now" in job(copy, *SMALL)[1]


# Folders of version 0.1


def test_an_older_job_goes_on(job: Any, whole: Path, copy: Path) -> None:
    as_version_1(copy)
    kept = {name: value for name, value in files(copy).items() if name.endswith(("0.npz", "2.npz", "0.json"))}
    (copy / "shards/000001.npz").unlink()
    status, out, _ = job(copy, *SMALL)
    assert (status, "1 made now" in out) == (0, True)
    assert kept.items() <= files(copy).items()
    assert np.array_equal(samples(copy)["x"], samples(whole)["x"])
    assert "all of them complete before" in job(copy, *SMALL)[1]


def plan_file(path: Path, *methods: jf.Method) -> Path:
    """A plan as version 0.1 wrote it."""
    doc = json.loads(jf.Plan(methods).to_json()) | {"version": 1}
    path.write_text(json.dumps(doc))
    return path


@pytest.mark.parametrize("given", [{"width": 4}, {"max_sweeps": 9}])
def test_an_older_job_with_closed_windows_is_refused(job: Any, tmp_path: Path, given: dict[str, int]) -> None:
    """Its other samples were made by windows that this version does not have."""
    methods = jf.Method(width=1), jf.Method(tol=1e-3, **given), jf.Method(tol=0.5)
    path, out = tmp_path / "mine.json", tmp_path / "out"
    jf.Plan(methods).save(path)
    assert job(out, *SMALL, "--plan", path)[0] == 0
    as_version_1(out)
    (out / "shards/000001.npz").unlink()
    before = files(out)
    status, said, line = job(out, *SMALL, "--plan", path)
    assert (status, said) == (2, "")
    assert line == (
        f"jacobiflow sample: {out} holds a job that cannot be resumed: its plan was made for closed windows, "
        "which this version does not have: finish it with version 0.1, or run tune again and begin in a new "
        "--out\n"
    )
    assert files(out) == before


def test_an_older_job_with_a_plan_file_goes_on(job: Any, tmp_path: Path) -> None:
    methods = jf.Method(width=1), jf.Method(tol=0.1), jf.Method(tol=0.5)
    path, out = plan_file(tmp_path / "mine.json", *methods), tmp_path / "out"
    assert job(out, *SMALL, "--plan", path)[0] == 0
    doc = json.loads((out / "manifest.json").read_text())
    doc["settings"]["plan"] = path.read_text()
    (out / "manifest.json").write_text(json.dumps(doc))
    as_version_1(out)
    (out / "shards/000001.npz").unlink()
    status, said, line = job(out, *SMALL, "--plan", path)
    assert "1 made now" in said, line
    other = plan_file(tmp_path / "other.json", *methods[:2], jf.Method(tol=0.4))
    status, _, line = job(out, *SMALL, "--plan", other)
    assert (status, "holds a job with other settings" in line) == (2, True)


def test_an_older_job_without_its_manifest_is_unknown(job: Any, copy: Path) -> None:
    as_version_1(copy)
    (copy / "manifest.json").unlink()
    before = files(copy)
    for flags in ((), ("--seed", 6)):
        status, _, err = job(copy, *SMALL, *flags)
        assert (status, "records/000000.json is not of this job" in err) == (2, True)
    assert files(copy) == before


def test_older_records_beside_a_newer_manifest_are_unknown(job: Any, copy: Path) -> None:
    text = (copy / "manifest.json").read_text()
    as_version_1(copy)
    (copy / "manifest.json").write_text(text)
    status, _, err = job(copy, *SMALL)
    assert (status, "records/000000.json is of another job" in err) == (2, True)


def test_black_pictures_of_an_older_job_go(job: Any, tmp_path: Path) -> None:
    """Version 0.1 drew samples that are not finite; their shards are made again, once."""
    flow, out = overflowing(16), tmp_path / "out"
    flow.save(tmp_path / "model")
    flags = ("-n", 12, "--batch", 2, "--shard", 4, "--format", "png")
    assert job(out, *flags, model=tmp_path / "model")[0] == 1
    lost = [i for p in out.glob("records/*") for i in json.loads(p.read_text())["nonfinite"]]
    pictures = {name for name in files(out) if name.endswith(".png")}
    as_version_1(out)
    for i in lost:
        name = f"shards/{i // 4:06d}/{i:09d}.png"
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(b"black")
        path = out / f"records/{i // 4:06d}.json"
        doc = json.loads(path.read_text())
        doc["files"] = dict(sorted((doc["files"] | {name: "0"}).items()))
        path.write_text(json.dumps(doc))
    many = len({i // 4 for i in lost})
    status, text, _ = job(out, *flags, model=tmp_path / "model")
    assert (status, f"{many} made now" in text) == (1, True)
    assert {name for name in files(out) if name.endswith(".png")} == pictures
    assert "all of them complete before" in job(out, *flags, model=tmp_path / "model")[1]
