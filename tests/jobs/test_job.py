"""Sampling as a job, in this process: what is written, what is found again, what is refused."""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file
from tqdm import TMonitor

import jacobiflow as jf
from jacobiflow.cli import sample
from jacobiflow.cli.main import main
from jacobiflow.core import processes as world
from jacobiflow.core import progress as bars
from jacobiflow.core.pictures import to_pixels
from jacobiflow.jobs import manifest, runner, sampling
from leftovers import PATIENCE, SMALL, command, files, samples
from subjects import maf, tarflow

TOLERANCE = 1e-4  # of samples decoded in other batches or by other threads, as the documentation says


def expected(flow: jf.Flow, n: int = 22, at_a_time: int = 4, seed: int = 5, **options: Any) -> torch.Tensor:
    parts = []
    for first in range(0, n, at_a_time):
        count = min(at_a_time, n - first)
        labels = (first + torch.arange(count)) % 3
        parts.append(flow.decode(flow.noise(count, seed, start=first), labels=labels, **options).x)
    return torch.cat(parts)


# What is written


def test_samples_are_those_of_the_library(flow: Any, whole: Path) -> None:
    found = samples(whole)
    assert found.keys() == {"x", "index", "labels"}
    assert found["index"].tolist() == list(range(22))
    assert found["labels"].tolist() == [i % 3 for i in range(22)]
    torch.testing.assert_close(torch.from_numpy(found["x"]), expected(flow[0]), atol=0, rtol=0)
    assert sorted(p.name for p in whole.iterdir()) == [
        ".lock",
        "SHA256SUMS",
        "manifest.json",
        "records",
        "shards",
    ]


def test_sums_are_those_of_the_files(whole: Path) -> None:
    sums = dict(reversed(line.split("  ")) for line in (whole / "SHA256SUMS").read_text().splitlines())
    assert list(sums) == [f"shards/00000{i}.npz" for i in range(3)]
    assert {k: v for k, v in files(whole).items() if k.startswith("shards")} == sums


def test_the_same_job_makes_the_same_files(job: Any, whole: Path, tmp_path: Path) -> None:
    status, out, err = job(tmp_path / "again", *SMALL)
    assert status == 0
    assert files(tmp_path / "again") == files(whole)
    assert out == f"22 samples in 3 shards in {tmp_path / 'again'}, 3 made now: 22 exact\n"
    assert err.startswith("22 samples in 3 shards of 8, batches of 4, on 1 x cpu with 1 thread, into ")


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("--plan uniform --tol 0.1 --init zeros", {"plan": "uniform", "tol": 0.1, "init": "zeros"}),
        ("--plan plan.json", {"plan": jf.Plan((jf.Method(width=3),) * 3)}),
        (
            "--guidance 1 --guide b --annealed",
            {"guidance": jf.Guidance(weight=1, what="b", annealed=True)},
        ),
    ],
)
def test_options_reach_the_decoder(
    job: Any, flow: Any, tmp_path: Path, flags: str, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    jf.Plan((jf.Method(width=3),) * 3).save("plan.json")
    assert job(tmp_path / "out", *SMALL, *flags.split())[0] == 0
    want = expected(flow[0], **options)
    assert np.array_equal(samples(tmp_path / "out")["x"], want.numpy())
    assert not torch.equal(want, expected(flow[0]))
    assert "all of them complete before" in job(tmp_path / "out", *SMALL, *flags.split())[1]


def test_denoising(job: Any, flow: Any, tmp_path: Path) -> None:
    assert job(tmp_path, *SMALL, "--denoise")[0] == 0
    want = flow[0].denoise(expected(flow[0]), labels=torch.arange(22) % 3)
    assert np.allclose(samples(tmp_path)["x"], want.numpy(), atol=1e-5)


def test_safetensors(job: Any, whole: Path, tmp_path: Path) -> None:
    assert job(tmp_path, *SMALL, "--format", "safetensors")[0] == 0
    parts = [load_file(p) for p in sorted(tmp_path.glob("shards/*.safetensors"))]
    for name, want in samples(whole).items():
        assert np.array_equal(np.concatenate([part[name] for part in parts]), want)


def test_pictures(job: Any, whole: Path, tmp_path: Path) -> None:
    assert job(tmp_path, *SMALL, "--format", "png")[0] == 0
    pixels = to_pixels(torch.from_numpy(samples(whole)["x"]))[..., 0]
    assert pixels.min() < pixels.max()
    found = sorted(tmp_path.glob("shards/*/*.png"))
    assert [p.name for p in found] == [f"{i:09d}.png" for i in range(22)]
    assert [p.parent.name for p in found] == [f"{i // 8:06d}" for i in range(22)]
    for path, want in zip(found, pixels, strict=True):
        with Image.open(path) as picture:
            assert np.array_equal(np.asarray(picture), want)
    with (tmp_path / "shards/000001/metadata.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert rows == [{"file_name": f"{i:09d}.png", "label": str(i % 3)} for i in range(8, 16)]
    found[3].unlink()
    assert "1 made now" in job(tmp_path, *SMALL, "--format", "png")[1]
    assert found[3].exists()


def test_vectors_without_labels(job: Any, tmp_path: Path) -> None:
    flow = maf(1.1, blocks=2).eval()
    flow.save(tmp_path / "maf")
    flags = ("-n", 9, "--format", "npz", "--batch", 4)
    assert job(tmp_path / "out", *flags, model=tmp_path / "maf")[0] == 0
    found = samples(tmp_path / "out")
    assert found.keys() == {"x", "index"}
    parts = [flow.decode(flow.noise(min(4, 9 - i), 0, start=i)).x for i in (0, 4, 8)]
    assert np.array_equal(found["x"], torch.cat(parts).numpy())


def test_samples_depend_on_seed_and_number_only(job: Any, whole: Path, tmp_path: Path) -> None:
    assert job(tmp_path / "a", *SMALL, "-n", 40, "--batch", 3, "--shard", 7)[0] == 0
    assert job(tmp_path / "b", *SMALL, "--seed", 6)[0] == 0
    x, other, want = (samples(out)["x"] for out in (tmp_path / "a", tmp_path / "b", whole))
    assert np.abs(x[:22] - want).max() < TOLERANCE
    assert np.abs(other - want).max() > 0.1


def test_two_threads_draw_the_same_samples(job: Any, whole: Path, tmp_path: Path) -> None:
    try:
        assert job(tmp_path, *SMALL, "-n", 4, "--threads", 2)[0] == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert np.abs(samples(tmp_path)["x"] - samples(whole)["x"][:4]).max() < TOLERANCE


def test_a_large_number_is_a_job(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "LARGE_JOB", 20)
    assert job(tmp_path / "a", "-n", 20)[0] == 0
    assert samples(tmp_path / "a")["index"].tolist() == list(range(20))
    assert job(tmp_path / "b", "-n", 19)[0] == 0
    assert (tmp_path / "b/samples.npz").exists()


def test_how_samples_ended_is_told(job: Any, tmp_path: Path) -> None:
    flow = maf(1.0, features=4, blocks=1, hidden=(6,), scale="exp")
    with torch.no_grad():
        flow.blocks[0].head.bias[:] = 1e4
    flow.save(tmp_path / "bad")
    status, out, _ = job(tmp_path / "out", "-n", 5, "--format", "npz", "--json", model=tmp_path / "bad")
    doc = json.loads(out)
    assert (status, doc["status"], doc["made"], doc["settings"]["n"]) == (1, {"NONFINITE": 5}, 1, 5)


def test_a_plan_that_is_too_loose_is_told_before_a_night_is_spent(job: Any, tmp_path: Path) -> None:
    tarflow(0.3, num_classes=3, blocks=3).save(tmp_path / "hard")
    small = ("-n", 8, "--shard", 4, "--format", "npz", "--plan")
    told = []
    for i, plan in enumerate((["uniform", "--tol", 4], ["uniform", "--tol", 1e-4], ["sequential"])):
        status, _, err = job(tmp_path / str(i), *small, *plan, model=tmp_path / "hard")
        assert status == 0
        told.append(re.findall(r"far from exact, residual [\d.]+: lower --tol, or use --plan auto", err))
    assert [len(lines) for lines in told] == [1, 0, 0]
    again = job(tmp_path / "0", *small, "uniform", "--tol", 4, model=tmp_path / "hard")
    assert "far from exact" not in again[2]  # nothing is decoded again


# What is found again


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Any] = {
    "flipped": lambda out: flip(out / "shards/000001.npz"),
    "cut off": lambda out: os.truncate(out / "shards/000001.npz", 500),
    "empty": lambda out: os.truncate(out / "shards/000001.npz", 0),
    "deleted": lambda out: (out / "shards/000001.npz").unlink(),
    "a folder": lambda out: ((out / "shards/000001.npz").unlink(), (out / "shards/000001.npz").mkdir()),
    "a pipe": lambda out: replace(out / "shards/000001.npz", os.mkfifo),
    "a device": lambda out: replace(out / "shards/000001.npz", lambda p: p.symlink_to("/dev/zero")),
    "a link to another": lambda out: replace(
        out / "shards/000001.npz", lambda p: p.symlink_to(shutil.copy(p.parent / "000000.npz", out.parent))
    ),
    "a link to itself": lambda out: moved(out, "shards/000001.npz"),
    "a record that is a link": lambda out: moved(out, "records/000001.json"),
    "a record that is a pipe": lambda out: replace(out / "records/000001.json", os.mkfifo),
    "no record": lambda out: (out / "records/000001.json").unlink(),
    "half a record": lambda out: os.truncate(out / "records/000001.json", 50),
    "no JSON": lambda out: (out / "records/000001.json").write_text("[]"),
    "another's record": lambda out: shutil.copy(out / "records/000000.json", out / "records/000001.json"),
    "a record that points elsewhere": lambda out: edit(out, lambda doc: doc.update(files={"../x": "0"})),
    "a record of other statuses": lambda out: edit(out, lambda doc: doc.update(status={"FINE": 8})),
}


def replace(path: Path, make: Any) -> None:
    path.unlink()
    make(path)


def moved(out: Path, name: str) -> None:
    """The file itself, whole, but elsewhere; a link in its place."""
    target = out.parent / Path(name).name
    shutil.move(out / name, target)
    (out / name).symlink_to(target)


def edit(out: Path, change: Any) -> None:
    path = out / "records/000001.json"
    doc = json.loads(path.read_text())
    change(doc)
    path.write_text(json.dumps(doc))


@pytest.mark.parametrize("kind", [k for k in DAMAGE if k != "a folder"])
def test_a_damaged_shard_is_made_again(job: Any, whole: Path, copy: Path, kind: str) -> None:
    DAMAGE[kind](copy)
    before = {p: p.stat().st_mtime_ns for p in copy.glob("shards/00000[02].npz")}
    status, out, _ = job(copy, *SMALL)
    assert (status, "1 made now" in out) == (0, True)
    assert files(copy) == files(whole)
    assert before == {p: p.stat().st_mtime_ns for p in before}


@pytest.mark.parametrize("name", ["shards", "records", ".partial", "manifest.json", ".lock"])
def test_links_in_the_folder_lead_nowhere(job: Any, copy: Path, tmp_path: Path, name: str) -> None:
    """A folder may come from somebody else: nothing outside of it is written to, or emptied."""
    elsewhere = tmp_path / "elsewhere"
    if name == ".partial":
        elsewhere.mkdir()
    else:
        shutil.move(copy / name, elsewhere)
    (copy / name).symlink_to(elsewhere)
    before = elsewhere.read_bytes() if elsewhere.is_file() else files(elsewhere)
    status, _, err = job(copy, *SMALL)
    assert (status, err.count("\n")) == (2, 1)
    assert "is a link" in err or "symbolic links" in err
    assert before == (elsewhere.read_bytes() if elsewhere.is_file() else files(elsewhere))


def test_a_folder_of_pictures_that_is_a_link(job: Any, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    assert job(out, *SMALL, "--format", "png")[0] == 0
    shutil.move(out / "shards/000001", elsewhere)
    (out / "shards/000001").symlink_to(elsewhere)
    before = {p: p.stat().st_mtime_ns for p in elsewhere.iterdir()}
    status, _, err = job(out, *SMALL, "--format", "png")
    assert status == 2
    assert f"{out}/shards/000001 is a link, and a job writes into its own folder only" in err
    assert before == {p: p.stat().st_mtime_ns for p in elsewhere.iterdir()}


def test_a_job_that_could_not_be_read_again_is_not_begun(
    job: Any, flow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tmp_path / "plan.json"
    jf.Plan((jf.Method(),) * 3, about={"seconds": float("nan"), "notes": "a" * 10**6}).save(plan)
    for _ in range(2):
        assert job(tmp_path / "out", *SMALL, "--plan", plan)[0] == 0
    monkeypatch.setattr(runner, "MAX_TEXT_BYTES", 1000)
    status, _, err = job(tmp_path / "new", *SMALL, "--plan", plan)
    assert (status, err) == (
        2,
        "jacobiflow sample: these settings cannot be written down: use shorter ones, or a smaller plan\n",
    )
    assert not (tmp_path / "new/manifest.json").exists()


def test_a_shard_that_cannot_be_replaced_is_one_line(job: Any, copy: Path) -> None:
    DAMAGE["a folder"](copy)
    status, _, err = job(copy, *SMALL)
    assert status == 2
    assert f"cannot write into {copy}: Is a directory: fix that and rerun the command to resume" in err


def test_what_a_killed_job_was_writing_goes(job: Any, whole: Path, copy: Path) -> None:
    (copy / ".partial").mkdir()
    (copy / ".partial/abc").write_bytes(b"half")
    (copy / ".SHA256SUMS.0123456789abcdef").write_bytes(b"half")
    (copy / ".manifest.json.0123456789abcdef").write_bytes(b"half")
    status, out, _ = job(copy, *SMALL)
    assert (status, "all of them complete before" in out) == (0, True)
    assert files(copy) == files(whole)


def test_temporary_files_are_private(tmp_path: Path) -> None:
    runner.clear(tmp_path)
    assert (tmp_path / ".partial").stat().st_mode & 0o777 == 0o700


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.clear(tmp_path)
    manifest.write(tmp_path, {"shards/a": b"old"})

    def full(path: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        manifest.write(tmp_path, {"shards/a": b"new", "shards/b": b"new"})
    assert list(files(tmp_path)) == ["shards/a"]
    assert (tmp_path / "shards/a").read_bytes() == b"old"


# What is refused


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("-n", 23), "n 22, now 23"),
        (("--seed", 6), "seed 5, now 6"),
        (("--labels", "1"), "labels (0, 1, 2), now (1,)"),
        (("--plan", "uniform"), "plan auto, now uniform"),
        (("--tol", "0.25"), "plan auto, now selective; tol None, now 0.25"),
        (("--guidance", "1"), "guidance 0.0, now 1.0"),
        (("--denoise",), "denoise False, now True"),
        (("--format", "png"), "format npz, now png"),
        (("--threads", 2), "threads 1, now 2"),
        (("--batch", 8), "batch 4, now 8"),
        (("--batch", "auto"), "batch 4, now auto"),
        (("--shard", 4, "--seed", 1), "seed 5, now 1; shard 8, now 4"),
    ],
)
def test_other_settings(job: Any, whole: Path, flags: Any, words: str) -> None:
    before = files(whole)
    status, _, err = job(whole, *SMALL, *flags)
    line = f"{whole} holds a job with other settings ({words}): use those, or begin in a new --out"
    assert (status, err) == (2, f"jacobiflow sample: {line}\n")
    assert files(whole) == before


def test_what_auto_became_may_be_asked_for(job: Any, tmp_path: Path) -> None:
    flags = ("-n", 5, "--format", "npz")
    assert job(tmp_path, *flags)[0] == 0
    doc = json.loads((tmp_path / "manifest.json").read_text())
    assert (doc["settings"]["batch"], doc["batch"], doc["shard"]) == (0, 5, 5)
    assert job(tmp_path, *flags, "--batch", 5, "--shard", 5)[0] == 0


def test_another_model(job: Any, whole: Path, tmp_path: Path) -> None:
    tarflow(0.25, seed=1, num_classes=3).save(tmp_path / "other")
    status, _, err = job(whole, *SMALL, model=tmp_path / "other")
    assert (status, err) == (
        2,
        f"jacobiflow sample: {whole} holds samples of another model than this: begin in a new --out\n",
    )


def test_the_same_model_elsewhere_is_the_same(job: Any, flow: Any, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(flow[1], tmp_path / "moved")
    assert job(whole, *SMALL, model=tmp_path / "moved")[0] == 0


@pytest.mark.parametrize("kind", ["flipped", "empty", "something else", "an older one"])
def test_a_damaged_manifest(job: Any, copy: Path, kind: str) -> None:
    path = copy / "manifest.json"
    text = path.read_text()
    changed = {
        "flipped": text.replace('"batch": 4', '"batch": 5'),
        "empty": "",
        "something else": "{}",
        "an older one": text.replace('"version": 2', '"version": 0', 1),
    }
    path.write_text(changed[kind])
    status, _, err = job(copy, *SMALL)
    assert status == 2
    assert err.startswith(f"jacobiflow sample: {path} is damaged (")
    assert err.endswith("): restore it, or begin again in a new --out\n")


def test_a_second_job_on_one_folder(job: Any, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "WAIT", 0.1)
    with world.Lock(copy) as first:
        first.exclusive()
        first.shared()
        with world.Lock(copy) as rank:  # a process of the same job
            rank.shared()
            status, _, err = job(copy, *SMALL)
            assert status == 2
            who = f"process {os.getpid()} on "
            assert err.startswith(f"jacobiflow sample: {copy} is in use by {who}")
            assert err.endswith(": wait for it, or use another --out\n")
    assert job(copy, *SMALL)[0] == 0


def test_a_file_system_without_locks_is_told(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise OSError(world.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(world.fcntl, "flock", never)
    with world.Lock(copy) as mine, pytest.warns(UserWarning, match="without locks: run one job there"):
        mine.exclusive()


@pytest.mark.filterwarnings("always")  # the command prints its warnings
def test_other_versions_are_told(job: Any, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = manifest.versions
    for module in (manifest, runner):
        monkeypatch.setattr(module, "versions", lambda *args: real(*args) | {"torch": "9.9"})
    (copy / "shards/000000.npz").unlink()
    status, _, err = job(copy, *SMALL)
    assert status == 0
    assert ", now 9.9: the last digits of new samples may differ" in err
    assert json.loads((copy / "records/000000.json").read_text())["versions"]["torch"] == "9.9"
    assert json.loads((copy / "records/000001.json").read_text())["versions"]["torch"] != "9.9"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--format npz --check", "--check is for samples in memory"),
        ("--format npz -n 1000000001", "-n must be 1,000,000,000 or less, not 1000000001"),
        ("--format npz --batch 0", "--batch must be 1 or more, not 0"),
        ("--format npz --shard -1", "--shard must be 1 or more, not -1"),
        ("--format npz --shard 100001", "--shard must be 100,000 or less, not 100001"),
        ("--format npz --threads 1025", "--threads must be 1,024 or less, not 1025"),
        ("--format npz --threads 0", "--threads must be 1 or more, not 0"),
        ("--format npz --labels 3", "--labels 3 is outside 0-2"),
        ("--format npz --plan gone.json", "cannot read the plan gone.json"),
        ("--format npz --guidance nan", "weight must be finite"),
        ("--batch 4", "--batch and --shard belong to large jobs"),
        ("--shard 10", "--batch and --shard belong to large jobs"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(job: Any, tmp_path: Path, flags: str, words: str) -> None:
    status, out, err = job(tmp_path / "out", *flags.split())
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("make", "flags", "words"),
    [
        (
            lambda: maf(1.0),
            ("--format", "png"),
            "--format png: samples of shape [19] are no images, use npz",
        ),
        (lambda: maf(1.0, context=2), ("--format", "npz"), "this flow needs context"),
        (lambda: maf(1.0), ("--format", "npz", "--guidance", "1"), "guidance is for TarFlow"),
        (lambda: maf(1.0), ("--format", "npz", "--denoise"), "trained without Gaussian noise"),
    ],
)
def test_models_that_cannot(job: Any, tmp_path: Path, make: Any, flags: Any, words: str) -> None:
    make().save(tmp_path / "model")
    status, _, err = job(tmp_path / "out", *flags, model=tmp_path / "model")
    assert (status, err.count("\n")) == (2, 1)
    assert words in err
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * 10**9))
    status, _, err = job(tmp_path, "--format", "npz", "-n", 10**7, "--batch", 1)
    assert status == 2
    assert f"-n 10000000 needs 2.6 GB more in {tmp_path}, the disk has 2.0 GB: make room, or draw fewer" in err
    assert not (tmp_path / "manifest.json").exists()


# Memory


def test_a_batch_that_does_not_fit_is_halved_and_recorded(
    job: Any, flow: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = jf.TarFlow.decode

    def greedy(self: Any, z: Any, *args: Any, **options: Any) -> Any:
        if len(z) > 1 and 8 in range(first[0], first[0] + len(z)):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(self, z, *args, **options)

    noise, first = jf.TarFlow.noise, [0]

    def note(self: Any, n: int, seed: Any = None, *, start: int = 0) -> Any:
        first[0] = start
        return noise(self, n, seed, start=start)

    with monkeypatch.context() as patch:
        patch.setattr(jf.TarFlow, "decode", greedy)
        patch.setattr(jf.TarFlow, "noise", note)
        status, out, _ = job(tmp_path, *SMALL)
    assert status == 0
    assert out.endswith("memory ran out in 1 shards: their records give the smaller batches\n")
    batches = [json.loads((tmp_path / f"records/00000{i}.json").read_text())["batch"] for i in range(3)]
    assert batches == [4, 1, 4]
    found = samples(tmp_path)
    assert found["index"].tolist() == list(range(22))
    assert np.abs(found["x"] - samples(whole)["x"]).max() < TOLERANCE
    before = files(tmp_path)
    flip(tmp_path / "shards/000001.npz")  # made again as it was recorded
    assert job(tmp_path, *SMALL)[0] == 0
    assert files(tmp_path) == before


LIMIT = """
import jacobiflow as jf
jf.load('mnist-small').sample(2, plan='uniform', tol=10.0, backend='torch')
held = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmData'))
sys.argv += ['--max-memory', str((1024 * int(held) + 50e6) / 1e9)]
"""


@pytest.mark.slow
def test_a_memory_limit_splits_batches(tmp_path: Path) -> None:
    """A batch that takes 50 MB more than there are is halved until it fits."""
    flags = ("--format", "npz", "-n", 512, "--batch", 512, "--plan", "uniform", "--tol", 10)
    code = f"exec({LIMIT!r})"
    with command("sample", "mnist-small", *flags, "--backend", "torch", "--out", tmp_path, before=code) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert "memory ran out in 1 shards: their records give the smaller batches" in out
    record = json.loads((tmp_path / "records/000000.json").read_text())
    assert (record["count"], record["batch"] < 512) == (512, True)


def test_a_job_resumes_with_another_memory_limit(job: Any, whole: Path, copy: Path) -> None:
    (copy / "shards/000001.npz").unlink()
    assert "1 made now" in job(copy, *SMALL, "--max-memory", 8)[1]
    assert files(copy) == files(whole)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't")])
def test_memory_that_is_never_enough_is_one_line(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(jf.TarFlow, "decode", never)
    status, _, err = job(tmp_path, *SMALL)
    assert status == 2
    assert err.endswith("jacobiflow sample: out of memory at sample 0, even in batches of one\n")
    status, _, err = job(tmp_path / "auto", "--format", "npz")
    assert status == 2
    assert "a sample needs more memory to decode than is free" in err


@pytest.mark.parametrize(
    ("free", "near", "limit", "want"),
    [
        (1e12, 1, 0, 256),
        (1e8, 1, 0, 32),
        (1e8, 4, 0, 8),
        (3e6, 1, 0, 1),
        (1e6, 1, 0, None),
        (1e12, 1, 0.1, 32),
    ],
)
def test_the_batch_follows_the_memory(
    flow: Any, monkeypatch: pytest.MonkeyPatch, free: float, near: int, limit: float, want: int | None
) -> None:
    peaks = iter((10_000_000, 14_000_000))  # a million bytes for each of four samples
    monkeypatch.setattr(sampling, "available_memory", lambda: free)
    monkeypatch.setattr(sampling, "peak_memory", lambda: next(peaks))
    monkeypatch.setattr(sampling, "used_memory", lambda: 0.0)
    asked = sampling.Settings(n=1000, max_memory=limit)
    if want is None:
        with pytest.raises(sampling.JobError, match=r"more memory to decode than is free \(0\.0 GB\)"):
            sampling.find_batch(flow[0], asked, near)
    else:
        assert sampling.find_batch(flow[0], asked, near) == want


@pytest.mark.parametrize(("n", "size", "want"), [(10**6, 256, 1024), (10**6, 100, 1000), (30, 4, 28), (3, 8, 8)])
def test_shards_are_whole_batches(flow: Any, n: int, size: int, want: int) -> None:
    assert sampling.find_shard(flow[0], sampling.Settings(n=n), size) == want


# Stopping, and telling


def test_ctrl_c_finishes_the_shard(job: Any, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = runner.draw

    def press(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return draw(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "draw", press)
        for before, done in ((0, 8), (8, 16)):
            status, _, err = job(tmp_path, *SMALL)
            assert status == 2
            assert (f"resuming: {before} samples are there already" in err) == (before > 0)
            assert err.splitlines()[-1] == (
                f"jacobiflow sample: stopped with {done} of 22 samples in {tmp_path}: rerun the command to resume"
            )
    assert job(tmp_path, *SMALL)[0] == 0
    assert files(tmp_path) == files(whole)
    status, _, err = job(tmp_path, "-n", "2", "--force")  # no large job
    assert (status, err) == (2, f"jacobiflow sample: {tmp_path} holds a job of shards: choose another --out\n")


def test_the_second_ctrl_c_ends_at_once(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(*args: Any) -> Any:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError

    monkeypatch.setattr(runner, "draw", press)
    status, _, err = job(tmp_path, *SMALL)
    assert (status, err.splitlines()[-1]) == (130, "jacobiflow sample: stopped")


def test_the_echo_of_torchrun_is_no_second_press(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    clock = iter((10.0, 10.0, 10.1, 13.0))
    monkeypatch.setattr(world.time, "monotonic", lambda: next(clock))
    stop = world.StopKey()
    stop.press(signal.SIGINT, None)
    stop.press(signal.SIGINT, None)
    assert stop.pressed
    with pytest.raises(KeyboardInterrupt):
        stop.press(signal.SIGINT, None)


def test_a_job_starts_no_thread(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that shows progress would print a traceback when the interpreter ends under it."""
    draw, before, seen = runner.draw, set(threading.enumerate()), []

    def look(*args: Any) -> Any:
        seen.append({t for t in threading.enumerate() if not isinstance(t, TMonitor)} - before)
        return draw(*args)

    monkeypatch.setattr(runner, "draw", look)
    assert job(tmp_path, *SMALL)[0] == 0
    assert seen == [set(), set(), set()]


def test_progress_in_plain_lines(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.0)
    monkeypatch.setattr(bars, "LINE_SECONDS", 0.0)
    status, _, err = job(tmp_path, *SMALL)
    assert status == 0
    assert any(line.startswith("16 of 22 samples, ") for line in err.splitlines())


def test_a_number_of_processes_that_is_none(job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "two")
    status, _, err = job(tmp_path / "out", *SMALL)
    assert (status, err) == (
        2,
        "jacobiflow sample: WORLD_SIZE in the environment must be a whole number, not 'two'\n",
    )


def test_a_terminal_that_lacks_letters(flow: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with PYTHONIOENCODING=ascii: what it lacks is a question mark, not a traceback."""
    said = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", said)
    assert main(["sample", str(flow[1]), "-n", "1", "--out", str(tmp_path / "dé")]) == 0
    said.flush()
    assert f"in {tmp_path}/d?: ".encode() in said.buffer.getvalue()


def test_the_versions_name_python(flow: Any, whole: Path) -> None:
    for name in ("manifest.json", "records/000000.json"):
        doc = json.loads((whole / name).read_text())
        assert doc["versions"]["python"] == platform.python_version()


def test_the_fingerprint_sees_every_weight(flow: Any) -> None:
    mine = jf.load(flow[1])
    want = manifest.fingerprint(mine)
    assert want == manifest.fingerprint(flow[0])
    with torch.no_grad():
        next(reversed(list(mine.parameters()))).view(-1)[-1] += 1e-6
    assert manifest.fingerprint(mine) != want
