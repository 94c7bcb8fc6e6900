"""`jacobiflow sample`: what it writes is what the library gives, and every mistake is one line."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import jacobiflow as jf
from jacobiflow.cli import sample
from jacobiflow.core import hardware
from jacobiflow.core.pictures import to_pixels
from jacobiflow.core.results import LARGE
from subjects import maf, tarflow

SHAPE: dict[str, Any] = {"image_size": 6, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}


@pytest.fixture
def labelled(tmp_path: Path) -> jf.Flow:
    """A flow of three classes, in the folder `model`."""
    flow = tarflow(0.25, num_classes=3, **SHAPE).eval()
    flow.save(tmp_path / "model")
    return flow


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of its own."""
    monkeypatch.chdir(tmp_path)


def arrays(path: str = "out/samples.npz") -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def decoded(flow: jf.Flow, n: int, plan: Any, **options: Any) -> jf.Decoded:
    return flow.decode(flow.noise(n, 0), plan, **options)


# What is written

FULL = "sample model -n 6 --labels 0-2 --plan uniform --tol 0.5 --guidance 1.0 --seed 0 --check"


def test_everything_at_once(run: Any, labelled: jf.Flow) -> None:
    ran = run(*FULL.split(), "--out", "a/out", "--json")
    assert (ran.status, ran.err) == (0, "")
    doc = json.loads(ran.out)
    assert doc["files"] == ["samples.png", "samples.npz"]
    assert {p.name for p in Path("a/out").iterdir()} == set(doc["files"])
    assert (doc["model"], doc["n"], doc["labels"], doc["seed"]) == ("model", 6, "0-2", 0)
    assert (doc["plan"], doc["out"], doc["nonfinite"]) == ("uniform", "a/out", 0)
    found, labels = arrays("a/out/samples.npz"), torch.tensor([0, 1, 2, 0, 1, 2])
    assert found.keys() == {"x", "labels"}
    assert found["labels"].tolist() == labels.tolist()
    out = decoded(labelled, 6, "uniform", labels=labels, guidance=1.0, tol=0.5, check=True)
    assert np.array_equal(found["x"], out.x.numpy())
    assert (doc["status"], doc["backend"]) == (out.stats.status.name, out.stats.backend)
    assert out.stats.residual is not None
    assert doc["residual"] == pytest.approx(out.stats.residual.max().item())
    assert doc["seconds"] > 0
    plain = decoded(labelled, 6, "uniform", labels=labels, tol=0.5)
    assert not np.array_equal(found["x"], plain.x.numpy())  # guidance was not dropped


def test_facts_are_one_line(run: Any, labelled: jf.Flow) -> None:
    doc = json.loads(run(*FULL.split(), "--json").out)
    ran = run(*FULL.split(), "--force")
    (line,) = ran.out.splitlines()
    backend, residual = re.escape(doc["backend"]), re.escape(f"{doc['residual']:.2g}")
    assert re.fullmatch(
        rf"6 samples, plan uniform, backend {backend}, \d+\.\d{{3}} s, worst status converged, "
        rf"residual {residual}, in out: samples\.png, samples\.npz",
        line,
    )
    assert "residual" not in run("sample", "model", "-n", 2, "--force").out


def test_samples_are_replaced_only_if_asked_and_nothing_stale_stays(run: Any, labelled: jf.Flow) -> None:
    assert run("sample", "model", "-n", 2).status == 0
    before = Path("out/samples.npz").read_bytes()
    told = run("sample", "model", "-n", 3).complaint
    assert told.endswith("out has samples.png and samples.npz: add --force to replace, or choose another name")
    assert Path("out/samples.npz").read_bytes() == before
    maf(0.5, features=5, blocks=2, hidden=(8,)).save("vectors")
    assert run("sample", "vectors", "-n", 3, "--force").status == 0
    assert [path.name for path in Path("out").iterdir()] == ["samples.npz"]


def test_a_full_disk_leaves_what_was_there(run: Any, labelled: jf.Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert run("sample", "model", "-n", 2).status == 0
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    monkeypatch.setattr(os, "fsync", full)
    told = run("sample", "model", "-n", 3, "--force").complaint
    assert told.endswith("No space left on device: 'out/samples.npz'")
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before


def test_only_one_plan_is_decoded(run: Any, labelled: jf.Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, plans = jf.TarFlow.decode, []

    def watched(self: Any, z: Any, plan: Any, **options: Any) -> Any:
        plans.append(plan)
        return decode(self, z, plan, **options)

    monkeypatch.setattr(jf.TarFlow, "decode", watched)
    assert run("sample", "model", "-n", 3, "--plan", "selective").status == 0
    assert plans == [labelled.plan("selective")]


def test_the_grid_shows_the_samples(run: Any, labelled: jf.Flow) -> None:
    assert run("sample", "model", "-n", 5, "--plan", "sequential").status == 0
    with Image.open("out/samples.png") as picture:
        assert picture.mode == "L"
        assert picture.size == (2 * (3 * 7 + 1), 2 * (2 * 7 + 1))
        sheet = np.asarray(picture)[::2, ::2]
    pixels = to_pixels(decoded(labelled, 5, "sequential").x)[..., 0]
    assert pixels.min() < pixels.max()
    for i, image in enumerate(pixels):
        top, left = 1 + 7 * (i // 3), 1 + 7 * (i % 3)
        assert np.array_equal(sheet[top : top + 6, left : left + 6], image)
    assert (sheet[8:, 15:] == 128).all()


def test_the_same_command_draws_the_same_samples(run: Any, labelled: jf.Flow) -> None:
    for seed, out in enumerate(("a", "b")):
        torch.manual_seed(seed)
        assert run(*FULL.split(), "--denoise", "--out", out).status == 0
    assert Path("a/samples.png").read_bytes() == Path("b/samples.png").read_bytes()
    one, two = arrays("a/samples.npz"), arrays("b/samples.npz")
    assert all(np.array_equal(one[k], two[k]) for k in one)
    assert run(*FULL.split(), "--seed", 1, "--out", "c").status == 0
    assert not np.array_equal(arrays("c/samples.npz")["x"], one["x"])


def test_samples_depend_on_their_number_not_on_how_many(
    run: Any, labelled: jf.Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("sample", "model", "-n", 2, "--labels", 1, "--out", "few")
    monkeypatch.setattr(sample, "BATCH", 3)
    run("sample", "model", "-n", 7, "--labels", 1, "--out", "many")
    few, many = (arrays(f"{name}/samples.npz")["x"] for name in ("few", "many"))
    assert many.shape[0] == 7
    assert np.allclose(few, many[:2], atol=1e-5)


def test_denoising(run: Any, labelled: jf.Flow) -> None:
    n = 70  # more than one batch
    assert run("sample", "model", "-n", n, "--labels", "0,2", "--denoise", "--plan", "sequential").status == 0
    labels = torch.arange(n) % 2 * 2
    x = decoded(labelled, n, "sequential", labels=labels).x
    want = labelled.denoise(x, labels=labels)
    found = arrays()["x"]
    assert np.allclose(found, want.numpy(), atol=1e-5)
    assert not np.allclose(found, x.numpy(), atol=1e-5)


def test_a_plan_file(run: Any, labelled: jf.Flow) -> None:
    plan = jf.Plan((jf.Method(width=3, tol=0.01), jf.Method(width=1)))
    plan.save("fast.json")
    ran = run("sample", "model", "-n", 2, "--labels", 1, "--plan", "fast.json", "--json")
    assert ran.status == 0
    assert json.loads(ran.out)["plan"] == "fast.json"
    assert np.array_equal(arrays()["x"], decoded(labelled, 2, plan, labels=1).x.numpy())


@pytest.mark.parametrize(("init", "tol"), [("zeros", 0.3), ("noise", None)])
def test_tolerance_and_first_guess_reach_the_decoder(
    run: Any, labelled: jf.Flow, init: Any, tol: float | None
) -> None:
    extra = [] if tol is None else ["--tol", tol]
    assert run("sample", "model", "-n", 3, "--plan", "uniform", "--init", init, *extra).status == 0
    want = decoded(labelled, 3, "uniform", init=init, tol=tol).x.numpy()
    assert np.array_equal(arrays()["x"], want)


def test_guidance_options_reach_the_decoder(run: Any, labelled: jf.Flow) -> None:
    flags = "--labels 1 --guidance 2 --guide b --annealed --attn-temp 1.5 --plan sequential"
    assert run("sample", "model", "-n", 3, *flags.split()).status == 0
    guide = jf.Guidance(weight=2, what="b", annealed=True, attn_temp=1.5)
    want = decoded(labelled, 3, "sequential", labels=1, guidance=guide).x.numpy()
    assert np.array_equal(arrays()["x"], want)


def test_what_gives_guidance_an_effect(run: Any, labelled: jf.Flow) -> None:
    for extra in (["--labels", 1], ["--attn-temp", 2]):
        assert run("sample", "model", "-n", 1, "--guidance", 1, *extra, "--force").status == 0


@pytest.mark.parametrize("flags", ["--annealed", "--guide a", "--attn-temp 2"])
def test_options_of_guidance_without_guidance(run: Any, labelled: jf.Flow, flags: str) -> None:
    ran = run("sample", "model", "--labels", 1, *flags.split())
    assert (ran.status, Path("out").exists()) == (2, False)
    assert ran.err.endswith("change nothing alone: add --guidance 1.5\n")


def test_threads_reach_torch(run: Any, labelled: jf.Flow) -> None:
    threads = torch.get_num_threads()
    try:
        assert run("sample", "model", "-n", 1, "--threads", 2).status == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


# Other models


@pytest.mark.parametrize(("features", "side"), [(16, 4), (25, 5), (9, 0), (20, 0), (1, 0)])
def test_vectors_are_pictures_if_their_length_is_a_square(run: Any, features: int, side: int) -> None:
    flow = maf(0.5, features=features, blocks=2, hidden=(8,)).eval()
    flow.save("maf")
    ran = run("sample", "maf", "-n", 4, "--plan", "sequential", "--json")
    assert ran.status == 0
    assert json.loads(ran.out)["files"] == [*(["samples.png"] if side else []), "samples.npz"]
    assert Path("out/samples.png").exists() == bool(side)
    found = arrays()
    assert found.keys() == {"x"}
    assert np.array_equal(found["x"], decoded(flow, 4, "sequential").x.numpy())
    if side:
        with Image.open("out/samples.png") as picture:
            assert picture.size == (2 * (2 * (side + 1) + 1),) * 2


@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB"), (2, None), (4, None)])
def test_channels_that_make_no_picture(run: Any, channels: int, mode: str | None) -> None:
    tarflow(0.2, **SHAPE, image_channels=channels).save("model")
    assert run("sample", "model", "-n", 1).status == 0
    assert Path("out/samples.png").exists() == (mode is not None)
    if mode:
        with Image.open("out/samples.png") as picture:
            assert picture.mode == mode


def test_an_untrained_flow(run: Any) -> None:
    jf.TarFlow(jf.TarFlowConfig(**SHAPE, patch_size=2)).save("model")
    ran = run("sample", "model", "-n", 2, "--plan", "uniform")
    assert ran.status == 0
    assert "warning" not in ran.err


def test_samples_without_an_answer_leave_a_plain_report(run: Any) -> None:
    flow = maf(1.0, features=4, blocks=1, hidden=(6,), scale="exp")
    with torch.no_grad():
        flow.blocks[0].head.bias[:] = 1e4
    flow.save("model")
    ran = run("sample", "model", "-n", 2, "--plan", "uniform", "--check", "--json")
    assert ran.status == 1

    def never(name: str) -> None:
        raise AssertionError(name)

    doc = json.loads(ran.out, parse_constant=never)
    assert (doc["status"], doc["nonfinite"]) == ("NONFINITE", 2)


def strong(labelled: jf.Flow) -> float:
    """A guidance weight with which some of six samples overflow, and some do not."""
    for weight in 10.0 ** torch.arange(1, 6, 0.25):
        out = decoded(labelled, 6, None, labels=torch.arange(6) % 3, guidance=float(weight), warn=False)
        lost = int((~out.x.isfinite()).flatten(1).any(1).sum())
        if 0 < lost < 6:
            return float(weight)
    raise AssertionError


def test_samples_without_an_answer_are_counted_and_fail_the_command(run: Any, labelled: jf.Flow) -> None:
    weight = strong(labelled)
    ran = run("sample", "model", "-n", 6, "--labels", "0-2", "--guidance", weight, "--plan", "uniform")
    bad = ~np.isfinite(arrays()["x"]).all((1, 2, 3))
    lost = int(bad.sum())
    assert 0 < lost < 6
    assert ran.status == 1
    words = f"lower the guidance weight (it is {weight:g}), try float64, or check the weights"
    assert ran.err == f"jacobiflow sample: {lost} of 6 samples are not finite: {words}\n"
    assert "worst status nonfinite" in ran.out
    fine = run("sample", "model", "-n", 6, "--labels", "0-2", "--json", "--force")
    assert (fine.status, json.loads(fine.out)["nonfinite"]) == (0, 0)


def test_a_grid_of_the_command_crosses_out(run: Any, labelled: jf.Flow) -> None:
    weight = strong(labelled)
    flags = ("-n", 6, "--labels", "0-2", "--guidance", weight, "--plan", "sequential")
    assert run("sample", "model", *flags).status == 1
    bad = ~np.isfinite(arrays()["x"]).all((1, 2, 3))
    with Image.open("out/samples.png") as picture:
        sheet = np.asarray(picture)[::2, ::2]
    side = (sheet.shape[1] - 1) // 3 - 1
    corners = [sheet[1 + i // 3 * (side + 1), 1 + i % 3 * (side + 1) :][1] for i in range(6)]
    assert [int(c) == 176 for c in corners] == bad.tolist()


def test_denoising_that_overflows_counts(run: Any, labelled: jf.Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jf.TarFlow, "denoise", lambda self, x, labels: x / (torch.arange(4) > 0).view(4, 1, 1, 1))
    ran = run("sample", "model", "-n", 4, "--denoise")
    assert ran.status == 1
    assert "jacobiflow sample: 1 of 4 samples are not finite: " in ran.err


# Mistakes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("sample nothing", "no model 'nothing': give a bundled name"),
        ("sample model/config.json", "model/config.json is a file; a checkpoint is a folder"),
        ("sample empty", "empty has no config.json: it is not a checkpoint"),
        ("sample model --plan fast", "no plan is called 'fast': use sequential, uniform, selective"),
        ("sample model --plan missing.json", "cannot read the plan missing.json"),
        ("sample model --plan broken.json", "broken.json: a plan must be JSON"),
        ("sample model --plan three.json", "the plan has 3 methods, the flow 2 blocks"),
        (
            "sample model --plan two.json --tol 0.1",
            "--tol and --init are for uniform and selective; two",
        ),
        ("sample model --plan two.json --init zeros", "two.json carries its own"),
        ("sample model --plan sequential --tol 0.1", "sequential decoding is exact"),
        ("sample model --tol -1", "tol must be finite and not negative"),
        ("sample model --tol nan", "tol must be finite, not nan"),
        ("sample model --labels 3", "--labels 3 is outside 0-2"),
        ("sample model --labels 0-3", "--labels 0-3 is outside 0-2"),
        (
            "sample model --labels zero",
            "takes numbers and ranges such as 0-9 or 1,3,5-7, not 'zero'",
        ),
        ("sample plain --labels 0", "this model takes no labels: leave --labels out"),
        ("sample maf --labels 0", "this model takes no labels: leave --labels out"),
        ("sample maf --guidance 1", "guidance is for TarFlow"),
        ("sample maf --denoise", "--denoise: this flow was trained without Gaussian noise"),
        ("sample context", "this flow needs context, which the command line cannot give"),
        ("sample model --guidance inf", "weight must be finite"),
        ("sample model --guidance 1", "changes nothing at attn_temp 1: add --labels or --attn-temp 1.5"),
        ("sample plain --guidance 1", "changes nothing at attn_temp 1: add --attn-temp 1.5"),
        ("sample model --guidance 1 --attn-temp 0", "attn_temp must be from 1e-06 to 1e+06, not 0"),
        ("sample model -n 0", "-n must be 1 or more, not 0"),
        ("sample model --threads 0", "--threads must be 1 or more, not 0"),
        ("sample model --seed -1", "--seed must be 0 or more, not -1"),
        ("sample model -n 1000000000000", "-n must be 1,000,000,000 or less, not 1000000000000"),
        (f"sample model -n 1{'0' * 30}", "-n must be 1,000,000,000 or less"),
        ("sample model --device gpu", "--device must be auto, cpu, cuda, cuda:1 or the like, not 'gpu'"),
        ("sample model --device cuda:99", "--device cuda:99: this torch sees no such device"),
        ("sample model --device meta", "--device meta: this torch sees no such device"),
        ("sample model --out model/config.json", "model/config.json is a file: give a folder"),
        ("sample model --out model/config.json/x", "cannot be made: Not a directory"),
        ("sample nonfinite", "has non-finite values"),
    ],
)
def test_mistakes_are_one_line(run: Any, labelled: jf.Flow, args: str, words: str) -> None:
    Path("empty").mkdir()
    tarflow(0.2, **SHAPE).save("plain")
    maf(0.2, features=4, blocks=2, hidden=(4,)).save("maf")
    maf(0.2, features=4, blocks=2, hidden=(4,), context=2).save("context")
    bad = tarflow(0.2, **SHAPE)
    with torch.no_grad():
        bad.blocks[0].proj_in.bias[0] = math.nan
    bad.save("nonfinite")
    Path("broken.json").write_text("{")
    for name, count in (("two.json", 2), ("three.json", 3)):
        jf.Plan.sequential(count).save(name)
    text = run(*args.split()).complaint
    assert text.startswith("jacobiflow sample: ")
    assert words in text
    if "nonfinite" not in args:
        assert not Path("out").exists()  # found before anything was done


def test_a_folder_that_may_not_be_written(run: Any, labelled: jf.Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert run("sample", "model", "--out", "closed").complaint.endswith("closed cannot be written to: choose another")


def test_more_samples_than_memory(run: Any, labelled: jf.Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "total_memory", lambda: 10.0**7)
    line = run("sample", "model", "-n", 90_000).complaint
    assert re.search("-n 90000 takes .* GB of memory, .*: draw fewer, or", line)


def test_memory_is_unknown_on_some_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1e8 < hardware.total_memory() < 1e15
    monkeypatch.delattr(os, "sysconf")
    assert hardware.total_memory() == math.inf


@pytest.mark.slow
def test_the_command_for_real(labelled: jf.Flow) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "jacobiflow.cli.main", *FULL.split(), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0
    doc = json.loads(ran.stdout)  # nothing else is on standard output
    assert doc["status"] == "CONVERGED"
    labels = torch.tensor([0, 1, 2, 0, 1, 2])
    want = decoded(labelled, 6, "uniform", labels=labels, guidance=1.0, tol=0.5).x.numpy()
    assert np.allclose(arrays()["x"], want, atol=1e-5)


@pytest.mark.filterwarnings("always")  # the command prints its warnings
def test_a_loose_plan_is_told(run: Any) -> None:
    tarflow(0.3, num_classes=3, blocks=3).save("hard")
    loose = run("sample", "hard", "-n", 2, "--plan", "uniform")
    found = re.search(r"s, far from exact, residual ([\d.]+) \(lower --tol, or use --plan auto\), in out", loose.out)
    assert found is not None
    assert float(found[1]) > LARGE
    assert "converged" not in loose.out
    given = run("sample", "hard", "-n", 2, "--plan", "uniform", "--tol", 4, "--force").err
    assert given.startswith("jacobiflow: warning: tol 4 is loose for this flow, |encode(x) - z| reaches ")
    assert given.count("\n") == 1
    tight = run("sample", "hard", "-n", 2, "--plan", "uniform", "--tol", 1e-4, "--force")
    assert "warning" not in tight.err
    assert re.search(r"worst status converged, residual [\d.e-]+, in out", tight.out)


def test_progress_is_shown(run: Any, labelled: jf.Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample, "BATCH", 4)
    monkeypatch.setattr("jacobiflow.core.progress.LINE_SECONDS", 0.0)
    told = run("sample", "model", "-n", 9).err.splitlines()
    assert [line.partition(",")[0] for line in told if not line.startswith("0 ")] == [
        "4 of 9 samples",
        "8 of 9 samples",
        "9 of 9 samples",
    ]
