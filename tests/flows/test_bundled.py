"""`jf.models()`: what is bundled, as data and as a table."""

from __future__ import annotations

from importlib.metadata import EntryPoints
from pathlib import Path

import pytest

import jacobiflow as jf
from jacobiflow.flows import bundled, checkpoint, families
from subjects import maf, tarflow


def test_the_bundled_models() -> None:
    found = jf.models()
    assert [m.name for m in found] == checkpoint.bundled_names()
    for model in found:
        flow = jf.load(model.name)
        assert (model.family, model.classes) == (flow.family, flow.num_classes)
        assert model.length == flow.sequence_shape[0]
        assert model.parameters == sum(p.numel() for p in flow.parameters())
        assert model.data
        assert model.quality
    lines = repr(found).splitlines()
    assert lines[0].split() == list(bundled.HEAD)
    assert len(lines) == 2 + len(found)
    assert max(map(len, lines)) <= 80
    assert all(m.quality in line for m, line in zip(found, lines[2:], strict=True))


def test_models_that_cannot_be_loaded_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint, bundled):
        monkeypatch.setattr(module, "files", lambda name: tmp_path)
    assert repr(jf.models()) == "no models are installed: pip install ./models in the checkout"
    maf(1.0, features=4, hidden=(6,)).save(tmp_path / "a")
    tarflow(0.2, num_classes=3).save(tmp_path / "b")
    (tmp_path / "a/model.safetensors").write_bytes(b"")
    broken, fine = jf.models()
    assert broken.problem
    assert (fine.name, fine.classes, fine.data, fine.quality) == ("b", 3, "", "")
    *_, first, second = repr(jf.models()).splitlines()
    assert f"{first} {second}" == f"a cannot be loaded: {broken.problem}"
    assert max(len(first), len(second)) <= 80
    assert str(tmp_path) not in broken.problem


def test_a_model_of_a_family_that_is_not_installed_fits_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "registered", lambda: EntryPoints())
    (lost,) = (model for model in jf.models() if model.problem)
    lines = repr(jf.models()).splitlines()
    assert lost.name == "ising-16"
    assert "not 'lattice'" in lost.problem
    assert max(map(len, lines)) <= 80
