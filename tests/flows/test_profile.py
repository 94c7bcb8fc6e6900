"""Calibrated first guesses and convergence profiles: measured once, bound to the weights."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from pathlib import Path

import pytest
import torch

import jacobiflow as jf
from jacobiflow.core import results
from jacobiflow.core.records import RecordError
from jacobiflow.flows.calibration import Calibration, calibrate
from jacobiflow.flows.checkpoint import bundled_names
from jacobiflow.flows.profile import Profile, deviation_unit, measure_profile
from subjects import maf, tarflow


def small(**options: object) -> jf.Flow:
    return tarflow(0.25, num_classes=3, blocks=2, **options).float().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def profiled() -> jf.Flow:
    flow = small()
    calibrate(flow, noises=200)
    measure_profile(flow, noises=16)
    return flow


def test_a_calibrated_guess_is_closer_than_others(profiled: jf.Flow) -> None:
    z = profiled.noise(32, seed=9)
    exact = profiled.decode(z, "sequential").x
    one_sweep = {
        init: profiled.decode(z, jf.Plan((jf.Method(init=init, max_sweeps=1),) * 2), on_failure="return").x
        for init in ("calibrated", "previous", "zeros")
    }
    off = {init: (x - exact).abs().mean().item() for init, x in one_sweep.items()}
    assert off["calibrated"] < 0.9 * min(off["previous"], off["zeros"])


def test_the_guess_changes_no_exact_answer(profiled: jf.Flow) -> None:
    z = profiled.noise(4, seed=1)
    exact = profiled.decode(z, "sequential").x
    out = profiled.decode(z, jf.Plan((jf.Method(init="calibrated"),) * 2))
    assert (out.x - exact).abs().max() < 1e-4
    assert out.stats.plan == jf.Plan((jf.Method(init="calibrated", unit="absolute"),) * 2)


def test_the_default_guess_is_calibrated_where_there_is_one(profiled: jf.Flow) -> None:
    assert [m.init for m in profiled.plan("uniform")] == ["calibrated"] * 2
    assert [m.init for m in small().plan("uniform")] == ["previous"] * 2
    assert [m.init for m in maf(1.0).plan("uniform")] == ["zeros"] * 3
    assert [m.init for m in profiled.plan("uniform", init="zeros")] == ["zeros"] * 2


def test_a_flow_without_a_calibrated_guess_says_so() -> None:
    flow = small()
    with pytest.raises(ValueError, match="no calibrated first guess: run tune"):
        flow.sample(1, init="calibrated")


def test_changed_weights_make_the_guess_and_the_profile_void(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(results, "_warned", set())
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path))
    flow = small()
    calibrate(flow, noises=40)
    measure_profile(flow, noises=8)
    with torch.no_grad():
        flow.blocks[0].proj_out.bias.data += 0.01
    with pytest.warns(UserWarning, match="first guess of this flow is of other weights"):
        assert flow.guesses() is None
    with pytest.warns(UserWarning, match="profile of this flow is of other weights"):
        assert flow.plan() == jf.Plan.sequential(2).resolved("absolute")


def test_bundled_profiles_and_guesses_are_of_their_weights() -> None:
    for name in bundled_names():
        flow = jf.load(name)
        assert flow.profile.weights == flow.calibration.weights == flow.fingerprint()


def test_a_new_field_of_the_config_at_its_default_changes_no_fingerprint(profiled: jf.Flow) -> None:
    more = dataclasses.make_dataclass("More", [("new", int, 0)], bases=(type(profiled.config),), frozen=True)
    same, other = copy.deepcopy(profiled), copy.deepcopy(profiled)
    same.config = more(**dataclasses.asdict(profiled.config))
    other.config = more(**dataclasses.asdict(profiled.config), new=1)
    assert same.fingerprint() == profiled.fingerprint() != other.fingerprint()


def test_the_fingerprint_is_of_the_numbers(profiled: jf.Flow) -> None:
    same = small()
    assert same.fingerprint() == profiled.fingerprint() == same.double().fingerprint()
    with torch.no_grad():
        same.blocks[1].proj_in.weight.data[0, 0] += 1e-3
    assert same.fingerprint() != profiled.fingerprint()


def test_cells_hold_what_decoding_gives(profiled: jf.Flow) -> None:
    assert profiled.profile is not None
    (entry,) = profiled.profile.entries
    assert entry.noises == 16
    assert entry.guidance == jf.Guidance()
    for cells in entry.blocks:
        assert {c.width for c in cells} == {None, 8}  # wider windows do not fit 16 positions
        kinds = [
            (None, "float32"),
            (8, "float32"),
            *{(None, "mixed")} & {(c.width, c.precision) for c in cells},
        ]
        for kind in kinds:
            ladder = [c for c in cells if (c.width, c.precision) == kind]
            assert [c.tol for c in ladder] == sorted((c.tol for c in ladder), reverse=True)
            assert ladder[-1].deviation < ladder[0].deviation
            assert sum(ladder[-1].sweeps) > sum(ladder[0].sweeps)
            assert {len(c.guess_sweeps) for c in ladder} == {16 if kind[1] == "mixed" else 0}
            assert all(len(c.sweeps) == 16 and list(c.sweeps) == sorted(c.sweeps) for c in ladder)


def test_mixed_precision_is_measured_where_the_backend_has_it(profiled: jf.Flow) -> None:
    assert profiled.profile is not None
    has_it = profiled.bound_blocks(1)[0].engine.rough() is not None
    for cells in profiled.profile.entries[0].blocks:
        mixed = [c for c in cells if c.precision == "mixed"]
        assert bool(mixed) == has_it
        assert all(c.method == jf.Method(tol=c.tol, init=c.init, unit=c.unit, precision="mixed") for c in mixed)
        plain = {c.tol: c for c in cells if c.width is None and c.precision == "float32"}
        assert all(sum(c.sweeps) <= sum(plain[c.tol].sweeps) for c in mixed if c.tol in plain)


def test_deviations_are_measured_at_x(profiled: jf.Flow) -> None:
    """One block approximate, the other exact, on the same noise."""
    from jacobiflow.flows import profile

    assert profiled.profile is not None
    z = profiled.noise(16, profile.SEED)
    labels = profiled.every_label(16)
    exact = profiled.decode(z, "sequential", labels=labels).x
    for i, cells in enumerate(profiled.profile.entries[0].blocks):
        methods = [jf.Method(width=1)] * 2
        methods[i] = cells[0].method
        x = profiled.decode(z, jf.Plan(tuple(methods)), labels=labels).x
        assert (x - exact).abs().max().item() == pytest.approx(cells[0].deviation, rel=1e-3)


def test_features_are_measured_in_standard_deviations() -> None:
    flow = maf(1.0)
    x = torch.randn(500, 19, dtype=torch.float64) * torch.logspace(-6, 3, 19, dtype=torch.float64)
    unit = deviation_unit(flow, x)
    assert isinstance(unit, torch.Tensor)
    assert ((unit / torch.logspace(-6, 3, 19, dtype=torch.float64) - 1).abs() < 0.2).all()
    assert deviation_unit(small(), torch.zeros(3, 1, 8, 8)) == 1.0


@pytest.mark.parametrize(("seconds", "noises", "left_out"), [(1e3, 64, ""), (90, 10, "54 of 64 noises")])
def test_little_time_measures_fewer_noises(
    seconds: float, noises: int, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jacobiflow.flows.profile.perf_counter", itertools.count().__next__)
    entry = measure_profile(small(), noises=64, seconds=seconds)
    assert entry is not None
    assert (entry.noises, entry.left_out) == (noises, left_out)


def test_less_time_measures_fewer_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jacobiflow.flows.profile.perf_counter", itertools.count().__next__)
    entry = measure_profile(small(), noises=64, seconds=10)
    assert entry is not None
    assert entry.noises == 8
    assert re.fullmatch(r"56 of 64 noises, \d+ cells", entry.left_out)
    assert all(1 <= len(cells) < 8 for cells in entry.blocks)


def test_too_little_time_measures_nothing() -> None:
    flow = small()
    assert measure_profile(flow, noises=64, seconds=1e-6) is None
    assert flow.profile is None
    calibrate(flow, seconds=1e-6)
    assert flow.calibration is None


def test_another_guidance_is_another_entry() -> None:
    flow, strong = small(), jf.Guidance(weight=1.5)
    measure_profile(flow, noises=8)
    measure_profile(flow, strong, noises=8)
    assert flow.profile is not None
    assert [e.guidance for e in flow.profile.entries] == [jf.Guidance(), strong]
    assert flow.profile.entry(jf.Guidance(weight=1.0)) is None


def test_files(profiled: jf.Flow, tmp_path: Path) -> None:
    assert profiled.profile is not None
    assert profiled.calibration is not None
    profiled.profile.save(tmp_path)
    profiled.calibration.save(tmp_path)
    assert Profile.load(tmp_path) == profiled.profile
    found = Calibration.load(tmp_path, (2, 16, 4))
    assert found is not None
    assert torch.equal(found.mean, profiled.calibration.mean)
    assert found.weights == profiled.calibration.weights
    assert Calibration.load(tmp_path, (2, 17, 4)) is None
    (tmp_path / "profile.json").write_text("{}")
    (tmp_path / "guess.safetensors").write_bytes(b"no")
    assert Profile.load(tmp_path) is None
    assert Calibration.load(tmp_path, (2, 16, 4)) is None


@pytest.mark.parametrize("text", ["[]", "{", '{"format": "jacobiflow-profile", "version": 2}', '{"format": 3}'])
def test_other_files_are_no_profile(text: str) -> None:
    with pytest.raises(RecordError):
        Profile.from_json(text)
