"""The whole command on models of a few thousand weights, with a stand-in for the Inception network."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from markupsafe import escape
from torch import Tensor

import jacobiflow as jf
from jacobiflow.cli.main import main
from jacobiflow_lab.lattice.lattice_flow import LatticeConfig, LatticeFlow
from jacobiflow_lab.paper import models
from jacobiflow_lab.paper.check_report import check
from jacobiflow_lab.paper.claims import CLAIMS
from jacobiflow_lab.paper.paper_items import PAPER_ITEMS
from jacobiflow_lab.paper.registry import choose, every_item
from jacobiflow_lab.paper.sampling import AUTO, GUESSES, PAPER_METHODS, PREVIOUS, WINDOWS
from jacobiflow_lab.paper.schema import fill

CLASSES = {"mnist": 10, "cifar10-cpu": 10, "cifar100-paper": 100, "afhq-cat64-cpu": 0}
SMALL = {"image_size": 16, "patch_size": 4, "width": 64, "layers_per_block": 1}
HERE = ("mnist", "cifar10-cpu", "afhq-cat64-cpu")  # the third of the list has no weights


class Coarse:
    """Pixels of a small thumbnail: enough to tell pictures apart."""

    version, num_features = "coarse", 12

    def __call__(self, pixels: Tensor) -> Tensor:
        small = torch.nn.functional.adaptive_avg_pool2d(pixels.float().mean(1, keepdim=True), (3, 4))
        return small.flatten(1)


def shaken(flow: jf.Flow, scale: float = 0.05) -> jf.Flow:
    """Weights at which sweeps have work to do."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in flow.parameters():
            p.add_(scale * torch.randn(p.shape, generator=draw))
    return flow


def tarflow(channels: int, classes: int) -> jf.Flow:
    config = jf.TarFlowConfig(
        image_size=16,
        image_channels=channels,
        patch_size=4,
        width=16,
        head_dim=16,
        blocks=3,
        layers_per_block=1,
        num_classes=classes,
        noise_std=0.1,
    )
    return shaken(jf.TarFlow(config))


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of models and of data."""
    trained, data = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("data")
    for name in HERE:
        flow = tarflow(1 if name == "mnist" else 3, CLASSES[name])
        flow.save(trained / name / "model")
    for step in (10, 20):
        flow.save(trained / "afhq-cat64-cpu" / "kept" / f"step-{step:07d}")
    shaken(jf.MAF(jf.MAFConfig(features=64, blocks=2, hidden=(16,)))).save(trained / "mnist-maf")
    ising = LatticeFlow(LatticeConfig(features=16, blocks=2, hidden=(16,), temperature=3.0))
    shaken(ising, 0.05).save(trained / "ising-16")
    draw = np.random.default_rng(0)
    for source, shape, classes in (("mnist", (28, 28), 10), ("cifar10", (32, 32, 3), 10)):
        arrays: dict[str, Any] = {}
        for split, n in (("train", 40), ("test", 16)):
            arrays[f"x_{split}"] = draw.integers(0, 256, (n, *shape)).astype(np.uint8)
            arrays[f"y_{split}"] = np.arange(n) % classes
        np.savez(data / f"{source}.npz", **arrays)
    return trained, data


@pytest.fixture
def reproduce(
    rooms: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    """reproduce(out, "item", "--flag", ...) is the command, on the tiny models; returns what it printed."""
    for place in ("quality", "generators", "redundancy"):
        monkeypatch.setattr(f"jacobiflow_lab.paper.{place}.load_inception", lambda device: Coarse())
    tiny = replace(
        models.SCALES["cpu"],
        images=("mnist", "cifar100-paper", "afhq-cat64-cpu"),
        batches=(1, 3),
        repeats=1,
        runs=2,
        samples=16,
        few=12,
        small=12,
        scored=4,
        resamples=3,
        swept=6,
        memory_sides=(8, 16),
        memory_batch=2,
        random=dict.fromkeys(("random-afhq", "random-cifar"), SMALL),
        shown=8,
        analysed=4,
        reconstructed=6,
        ising=40,
        taus=(0.1, 0.5, 2.0),
    )
    monkeypatch.setitem(models.SCALES, "cpu", tiny)

    def run(out: Path, *args: object, status: int = 0) -> dict[str, Any]:
        trained, data = rooms
        capsys.readouterr()
        given = ["reproduce", *map(str, args), "--out", str(out), "--data-dir", str(data)]
        given += [] if "--models-dir" in args else ["--models-dir", str(trained)]
        given += [] if "--records" in args else ["--records", "None"]
        assert main([*given, "--json"]) == status
        said = capsys.readouterr()
        return {"err": said.err} if status else {**json.loads(said.out), "err": said.err}

    return run


@pytest.mark.slow
def test_all_items(tmp_path: Path, rooms: tuple[Path, Path], reproduce: Callable[..., dict[str, Any]]) -> None:
    out = tmp_path / "out"
    doc = reproduce(out)
    assert list(doc["items"]) == list(every_item())
    assert "100% done, about 0 min left" in doc["err"]
    for name, found in doc["items"].items():
        assert list(found) == list(every_item()[name].models(models.SCALES["cpu"])), name
        for model, one in found.items():
            assert one == json.loads((out / name / f"{model}.json").read_text())
            if model in ("cifar100-paper", "ising-maf"):
                assert f"no weights of {model}" in one["missing"]
                assert f"jacobiflow train {model}" in one["missing"]
            else:
                assert one["commit"]
                assert one["command"].startswith("jacobiflow reproduce")
                assert one["versions"]["torch"] == torch.__version__
    lost = {(n, m) for n, f in doc["items"].items() for m, d in f.items() if "missing" in d}
    weights = {(n, "cifar100-paper") for n in every_item() if "cifar100-paper" in doc["items"][n]}
    weights |= {("maf-ising", "ising-maf")}
    kept = {("undertrained", "mnist"), ("undertrained", "cifar10-cpu")}
    data = {(n, "afhq-cat64-cpu") for n in ("comparison", "tolerance", "reconstruction")}
    assert lost == weights | kept | data
    _check_timing(doc["items"]["timing"]["mnist"]["data"])
    _check_comparison(doc["items"]["comparison"])
    _check_reasons(doc)
    _check_page(out)
    _check_resume(out, reproduce)
    _check_held(out, rooms[0] / "afhq-cat64-cpu" / "kept", reproduce)
    _check_published(out, tmp_path / "public", reproduce)
    _check_recorded(tmp_path / "other", tmp_path / "public", reproduce)


def _check_timing(data: dict[str, Any]) -> None:
    """Methods are compared within a backend, torch first; what is not in the paper has rows of its own."""
    wanted = [("torch", b, m) for b in (1, 3) for m in ("plain loop", *PAPER_METHODS)]
    wanted += [("c", b, m) for b in (1, 3) for m in PAPER_METHODS]
    assert [(r["backend"], r["batch"], r["plan"]) for r in data["compare"]] == wanted
    assert [r["plan"] for r in data["beyond"]] == [WINDOWS, AUTO] * 2  # no calibrated guess is stored
    assert [(r["backend"], r["plan"]) for r in data["guesses"]] == [(b, g) for b in ("torch", "c") for g in GUESSES]
    assert [r["tau"] for r in data["taus"]] == ["0.1", "0.5", "2"]
    for row in data["compare"] + data["beyond"] + data["guesses"]:
        base = next(
            r
            for r in data["compare"]
            if (r["backend"], r["batch"], r["plan"]) == (row["backend"], row["batch"], "sequential")
        )
        assert row["speedup"] == pytest.approx(base["seconds"] / row["seconds"])
        assert row["whole_speedup"] == pytest.approx(base["whole"] / row["whole"])
        assert row["ceiling"] == (3 if row["plan"].startswith("selective") else None)
        assert len(row["runs"]) == 2
        assert row["spread"] == pytest.approx(max(abs(r - row["seconds"]) for r in row["runs"]))
        assert row["whole"] > row["seconds"]
        assert row["largest"] == 0 if row["plan"] == "sequential" else row["largest"] >= 0
    assert max(r["largest"] for r in data["compare"] if r["plan"] == "plain loop") < 1e-4
    for backend, found in data["blocks"].items():
        row = next(r for r in data["compare"] if (r["backend"], r["batch"], r["plan"]) == (backend, 3, "selective"))
        assert [r["selective"]["seconds"] for r in found["rows"]] == [b["seconds"] for b in row["layers"]]
        assert found["totals"]["selective"]["whole"] == pytest.approx(row["whole"])


def _check_comparison(found: dict[str, Any]) -> None:
    data = found["mnist"]["data"]
    inits = {name: plan[-1]["init"] for name, plan in data["plans"].items()}
    assert inits["selective"] == inits["uniform"] == "zeros"  # the paper's algorithm
    assert inits[PREVIOUS] == "previous"
    quality = data["quality"]
    assert quality["sequential"]["paired"] == 0
    counts = {m: q["samples"] for m, q in quality.items()}
    guided = "selective, annealed guidance 1"
    assert counts == dict.fromkeys((*PAPER_METHODS, guided), 16) | dict.fromkeys((PREVIOUS, WINDOWS, AUTO), 12)
    assert quality["auto"]["fid"] is None  # of fewer samples: it would not compare
    assert quality["sequential"]["scored"] in (0, 4)
    assert quality["selective"]["fid"] > 0
    thirds = quality["selective"]["fid_thirds"]
    assert quality["selective"]["fid_spread"] == pytest.approx(max(abs(t - sum(thirds) / 3) for t in thirds))
    change = quality["selective"]["change"]["fid"]
    assert change["value"] == pytest.approx(quality["selective"]["fid"] / quality["sequential"]["fid"] - 1, abs=1e-6)
    assert change["low"] <= change["high"]
    assert quality["selective"]["clip_iqa"] is None  # no CLIP was given
    assert found["mnist"]["counts"]["quality_samples"] == 16


def _check_reasons(doc: dict[str, Any]) -> None:
    """Every claim that was measured can say why it would not hold."""
    told = set()
    for claim in CLAIMS:
        for model, row in doc["items"][claim.item].items():
            entry = next(c for c in doc["claims"] if c["name"] == claim.name)["models"].get(model, {})
            if "numbers" in entry:
                reason = fill(claim.reason, row["data"])
                assert "–" not in reason, (claim.name, reason)  # every place of it is there
                assert len(reason) > 30
                assert bool(entry["reason"]) is (entry["holds"] is not True)
                told.add(claim.name)
    brisque, baselines = {"brisque"}, {c.name for c in CLAIMS if c.item == "generators"}
    cifar = {c.name for c in CLAIMS if c.models}
    assert {c.name for c in CLAIMS} - told - brisque - baselines == cifar


def _check_page(out: Path) -> None:
    numbers, pictures, wrong = check(out / "report.html")
    assert wrong == []
    assert numbers > 300
    assert pictures > 15
    page = (out / "report.html").read_text()
    for name, paper in PAPER_ITEMS.items():
        assert f'id="{name}"' in page
        for table in paper.tables:
            assert escape(table.title) in page
    assert "no weights of cifar100-paper" in page
    broken = page.replace('data-at="data/compare/0/seconds"', 'data-at="data/compare/0/batch"', 1)
    assert broken != page
    (out / "broken.html").write_text(broken)
    assert len(check(out / "broken.html")[2]) == 1
    for word, other in (("holds", "does not hold"), ("does not hold", "holds"), ("not measured", "holds")):
        assert f">{word}</span>" in page
        (out / "broken.html").write_text(page.replace(f">{word}</span>", f">{other}</span>", 1))
        assert len(check(out / "broken.html")[2]) == 1
    claims = json.loads((out / "claims.json").read_text())
    verdicts = {c["name"]: c["models"] for c in claims}
    assert verdicts["bounded"]["mnist"]["holds"] is True
    assert "missing" in verdicts["bounded"]["cifar100-paper"]
    told = [m for c in claims for m in c["models"].values() if "missing" not in m]
    assert all(m["numbers"] for m in told)


def _check_resume(out: Path, reproduce: Callable[..., dict[str, Any]]) -> None:
    path = out / "sweeps" / "mnist.json"
    before = path.stat().st_mtime_ns
    again = reproduce(out, "sweeps", "--models", "mnist")
    assert path.stat().st_mtime_ns == before
    assert "kept" in again["err"]
    reproduce(out, "sweeps", "--models", "mnist", "--again")
    assert path.stat().st_mtime_ns > before
    before = path.stat().st_mtime_ns
    other = reproduce(out, "sweeps", "--models", "mnist", "--seed", 1)
    assert path.stat().st_mtime_ns > before
    assert other["items"]["sweeps"]["mnist"]["seeds"] == {"noise": 1}


def _check_held(out: Path, kept: Path, reproduce: Callable[..., dict[str, Any]]) -> None:
    """Rows whose training run is elsewhere now stay as they were measured."""
    path = out / "undertrained" / "afhq-cat64-cpu.json"
    before = path.read_text()
    kept.rename(kept.with_name("elsewhere"))
    try:
        again = reproduce(out, "undertrained", "--models", "afhq-cat64-cpu", "--seed", 1)
    finally:
        kept.with_name("elsewhere").rename(kept)
    assert path.read_text() == before
    assert again["items"]["undertrained"]["afhq-cat64-cpu"]["data"]


def _check_published(out: Path, to: Path, reproduce: Callable[..., dict[str, Any]]) -> None:
    reproduce(out, "configuration", "--publish", to)
    numbers, pictures, wrong = check(to / "report.html")
    assert wrong == []
    assert (numbers, pictures) == check(out / "report.html")[:2]
    assert not list(to.rglob("*.png"))
    page = (to / "report.html").read_text()
    for file in to.rglob("afhq-cat64-cpu.json"):
        for picture in json.loads(file.read_text()).get("pictures", ()):
            _, _, after = page.partition(picture["sha256"])
            assert ("CC BY-NC 4.0" in after.partition("</figure>")[0]) is picture["restricted"]
    assert "NAVER" in (to / "LICENSE-AFHQ.txt").read_text()


def _check_recorded(out: Path, public: Path, reproduce: Callable[..., dict[str, Any]]) -> None:
    """Without the weights, what a published report says stands, with its pictures."""
    nowhere = out.parent / "nowhere"
    nowhere.mkdir()
    flags = ("sweeps", "samples", "--models", "afhq-cat64-cpu", "--models-dir", nowhere)
    doc = reproduce(out, *flags)["items"]
    assert "no weights" in doc["sweeps"]["afhq-cat64-cpu"]["missing"]
    said = reproduce(out, *flags, "--records", public)
    assert said["err"].count("from the record of commit") == 2
    for item, files in said["items"].items():
        doc = files["afhq-cat64-cpu"]
        told = json.loads((public / item / "afhq-cat64-cpu.json").read_text())
        assert doc == told | {"record": True}
        assert all((out / item / picture["file"]).is_file() for picture in doc["pictures"])
    assert check(out / "report.html")[2] == []
    assert "recorded by" in (out / "report.html").read_text()
    said = reproduce(out, *flags)  # and stays, once it is there
    assert said["items"]["sweeps"]["afhq-cat64-cpu"]["record"]
    said = reproduce(out, "sweeps", "--models", "afhq-cat64-cpu")  # weights are there: measured
    assert "record" not in said["items"]["sweeps"]["afhq-cat64-cpu"]


class Grey:
    """A baseline that draws noise around grey."""

    def sample(self, n: int, *, seed: int, start: int = 0) -> Tensor:
        rows = [torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(start, start + n)]
        return 0.3 * torch.stack(rows)


def test_baselines_stand_beside_the_flow(
    tmp_path: Path,
    rooms: tuple[Path, Path],
    reproduce: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jacobiflow_lab.paper.generators.load_baseline", lambda *_: Grey())
    out, public = tmp_path / "out", tmp_path / "public"

    def run(*args: object) -> dict[str, Any]:
        found = reproduce(out, "generators", "--models", "cifar10-cpu", *args)
        return found["items"]["generators"]["cifar10-cpu"]

    doc = run("--ddim", "somebody/ddim")
    flow, gan, ddim, shuffled = doc["data"]["rows"]
    assert gan["method"] == "FastGAN"
    assert "add --train-missing" in gan["missing"]
    assert flow["samples"] == ddim["samples"] == shuffled["samples"] == 12
    assert all(row["fid"] > 0 for row in (flow, ddim, shuffled))
    assert flow["seconds"] > 0
    assert ddim["seconds"] > 0
    assert "add --train-missing" in (out / "report.html").read_text()
    assert doc["lacking"] == "no weights of FastGAN"
    # What was measured without one of them is measured again when it is there.
    folder = rooms[0] / "cifar10-cpu-fastgan"
    folder.mkdir()
    (folder / "baseline.json").write_text('{"steps": 7}')
    whole = run("--ddim", "somebody/ddim", "--publish", public)
    assert "lacking" not in whole
    assert all("fid" in row for row in whole["data"]["rows"])
    assert whole["settings"]["baselines"] == {"fastgan": {"steps": 7}, "ddim": "somebody/ddim"}
    # And where they are not there, that stands.
    (folder / "baseline.json").unlink()
    folder.rmdir()
    assert run() == whole
    out = tmp_path / "elsewhere"
    assert run("--records", public) == whole | {"record": True}


def test_samples_lift_every_limit_but_lower_no_physics(
    tmp_path: Path, reproduce: Callable[..., dict[str, Any]]
) -> None:
    asked = ("comparison", "reconstruction", "maf-ising", "--models", "mnist", "ising-16", "--samples", 14)
    found = reproduce(tmp_path, *asked)["items"]
    counts = found["comparison"]["mnist"]["counts"]
    for name in ("quality_samples", "quality_samples_beyond_the_paper", "scored_samples"):
        assert counts[name] == 14
    assert found["reconstruction"]["mnist"]["counts"] == {"images": 14}
    assert found["maf-ising"]["ising-16"]["counts"]["samples"] == 40


def test_a_name_is_an_item_or_a_section() -> None:
    assert [item.name for item in choose(("comparison",))] == ["comparison"]
    assert [item.name for item in choose(("runtime", "masked"))] == ["timing", "similarity"]
    assert [item.name for item in choose(("tolerance",))] == [
        "timing",
        "tolerance",
    ]  # it draws the times, too
    assert [item.name for item in choose(())] == list(every_item())


def test_mistakes_are_one_line(tmp_path: Path, reproduce: Callable[..., dict[str, Any]]) -> None:
    for args, words in (
        (("nothing",), "no item is called 'nothing'; there are configuration"),
        (("sweeps", "--models", "what"), "--models of --scale cpu are mnist, cifar100-paper, afhq-cat64-cpu"),
        (("sweeps", "--models", "cifar10"), "not 'cifar10'"),
        (("sweeps", "--samples", 3), "--samples must be 8 or more"),
    ):
        said = reproduce(tmp_path, *args, status=2)["err"]
        assert words in said
        assert said.count("\n") == 1


def test_missing_data_is_a_row(tmp_path: Path, rooms: tuple[Path, Path], capsys: Any) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    flags = ["--models", "mnist", "--out", str(tmp_path / "out"), "--models-dir", str(rooms[0])]
    assert main(["reproduce", "reconstruction", *flags, "--data-dir", str(empty)]) == 0
    assert "mnist.npz is not in" in capsys.readouterr().out
