"""LatticeFlow: its network, its orders, its linear map, and checkpoints of version 0.1."""

from __future__ import annotations

import json
import math
from importlib.metadata import EntryPoints
from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow.cli.main import main
from jacobiflow.flows import families
from jacobiflow.flows.checkpoint import CONFIG
from jacobiflow_lab.lattice.lattice_flow import LatticeFlow
from subjects import lattice, maf


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"reach": -1}, "reach must be 0 or more"),
        ({"reach": 1}, "needs as many features as a square of side 3 or more has, not 19"),
        ({"features": 16, "reach": 2}, "a square of side 5 or more has, not 16"),
        ({"features": 25, "reach": 1, "order": "classes"}, "reach \\+ 1 must divide the side"),
        ({"order": "classes"}, "needs a reach"),
        ({"features": 9, "reach": 1, "context": 2}, "neither context nor residual"),
        ({"temperature": 3.0}, "needs a square number of features"),
        ({"features": 9, "context": 2, "temperature": 3.0}, "and no context"),
        ({"features": 9, "temperature": -1.0}, "temperature must be positive"),
        ({"features": 9, "temperature": 4.0, "shift": 1.0}, "shift must be above 4 / T = 1"),
        ({"order": "sorted"}, "order must be one of reversed, random, same, classes"),
    ],
)
def test_shapes_that_make_no_sense(options: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        lattice(0.0, **options)


def test_a_local_network_sees_earlier_sites_nearby_and_is_the_same_everywhere() -> None:
    shape = {"features": 49, "reach": 1, "hidden": (16,), "blocks": 1, "activation": "tanh"}
    flow = lattice(1.5, order="same", **shape).double()
    x = torch.randn(1, 49, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    jacobian = torch.autograd.functional.jacobian(lambda v: flow.encode(v).z, x)[0, :, 0]
    sees = {(row, column): [] for row in range(7) for column in range(7)}
    for site, other in jacobian.nonzero().tolist():
        sees[divmod(site, 7)].append(divmod(other, 7))
    assert sees[0, 0] == [(0, 0)]
    assert sees[3, 3] == [(2, 2), (2, 3), (2, 4), (3, 2), (3, 3)]
    assert sees[3, 6] == [(2, 0), (2, 5), (2, 6), (3, 0), (3, 5), (3, 6)]  # around the torus
    assert len(sees[6, 6]) == 9
    moved = flow.encode(x.view(1, 7, 7).roll((1, 1), (1, 2)).view(1, 49)).z.view(7, 7)
    assert torch.allclose(moved[3:6, 3:6], flow.encode(x).z.view(7, 7)[2:5, 2:5], atol=1e-12)


def test_a_class_of_sites_is_solved_by_one_sweep() -> None:
    """Nine classes of four sites; a second sweep of each finds that nothing moves."""
    shape = {"features": 36, "reach": 2, "hidden": (16,), "blocks": 2, "activation": "tanh"}
    flow = lattice(1.5, order="classes", **shape).double()
    first, second = flow.config.orders()
    assert torch.equal(first.view(9, 4), second.view(9, 4).flip(0))
    for group in first.view(9, 4):
        rows, columns = group // 6, group % 6
        assert len(set((rows % 3).tolist())) == len(set((columns % 3).tolist())) == 1
    z = flow.noise(5, seed=0)
    out, exact = flow.decode(z, "selective"), flow.decode(z, "sequential")
    assert (out.x - exact.x).abs().max() < 1e-12
    assert out.stats.status is jf.Status.EXACT
    for block in out.stats.blocks:
        assert block.sweeps.max() <= 2 * 9
    assert (lattice(1.5, order="same", **shape).double().decode(z, "selective").stats.blocks[0].sweeps > 2 * 9).any()


def test_a_linear_map_next_to_the_data() -> None:
    flow = lattice(0.0, linear=True)
    flow.linear.copy_(2 * torch.eye(19).flip(0))
    out = flow.sample(3, seed=0)
    assert torch.allclose(out.x, 2 * flow.noise(3, seed=0).flip(1), atol=1e-5)
    assert out.log_det.tolist() == pytest.approx([19 * math.log(2)] * 3, abs=1e-4)
    singular = lattice(0.0, linear=True)
    singular.linear[0] = 0
    with pytest.raises(jf.NonfiniteError, match="linear map next to the data is singular"):
        singular.sample(1)


# Checkpoints

ISING = {"kind": "ising", "side": 5, "temperature": 2.5, "shift": 4.0}
# Options, and the target that stood beside the config.
OF_0_1: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "local": ({"features": 25, "reach": 2, "order": "random"}, ISING),
    "local, linear": ({"features": 25, "reach": 1, "linear": True, "transform": "spline"}, ISING),
    "masked": ({"features": 25}, ISING),
    "linear, no square": ({"features": 7, "linear": True}, None),
    "linear, context": ({"features": 7, "context": 2, "linear": True}, None),
}


def write_0_1(flow: jf.Flow, folder: Path, target: object = None) -> None:
    """The checkpoint as version 0.1 wrote it: family maf, with the target beside the config."""
    flow.save(folder)
    doc = json.loads((folder / CONFIG).read_text())
    doc["family"] = "maf"
    doc["config"] = {"reach": 0, "linear": False} | doc["config"]
    for name in ("temperature", "shift"):
        doc["config"].pop(name, None)
    if target is not None:
        doc["target"] = target
    (folder / CONFIG).write_text(json.dumps(doc))


@pytest.fixture
def no_lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no distribution registered a family."""
    monkeypatch.setattr(families, "registered", lambda: EntryPoints(()))


@pytest.mark.parametrize("name", OF_0_1)
def test_checkpoints_of_0_1_load(name: str, tmp_path: Path) -> None:
    options, target = OF_0_1[name]
    physics = {} if target is None else {"temperature": 2.5, "shift": 4.0}
    flow = lattice(0.8, **options, **physics)
    write_0_1(flow, tmp_path, target)
    again = jf.load(tmp_path)
    assert isinstance(again, LatticeFlow)
    assert again.config == flow.config
    condition = {"context": torch.ones(2)} if again.context_features else {}
    assert torch.equal(again.sample(3, seed=0, **condition).x, flow.sample(3, seed=0, **condition).x)
    again.save(tmp_path)
    assert json.loads((tmp_path / CONFIG).read_text())["family"] == "lattice"
    assert jf.load(tmp_path).config == flow.config


@pytest.mark.parametrize("name", OF_0_1)
def test_checkpoints_of_0_1_name_the_package(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    options, target = OF_0_1[name]
    write_0_1(lattice(0.8, **options), tmp_path, target)
    request.getfixturevalue("no_lab")  # saving needs the family, reading is what is tested
    with pytest.raises(jf.CheckpointError, match=r"now part of jacobiflow-lab: pip install ./lab in the checkout$"):
        jf.load(tmp_path)


@pytest.mark.usefixtures("no_lab")
def test_a_maf_of_0_1_needs_no_lab(tmp_path: Path) -> None:
    flow = maf(0.8)
    write_0_1(flow, tmp_path)
    again = jf.load(tmp_path)
    assert type(again) is jf.MAF
    assert again.config == flow.config
    assert torch.equal(again.sample(3, seed=0).x, flow.sample(3, seed=0).x)


@pytest.mark.usefixtures("no_lab")
def test_without_the_lab_the_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "family must be one of tarflow, maf, not 'lattice'; jacobiflow-lab has more families: pip install ./lab"
    with pytest.raises(jf.CheckpointError, match=f"{said} in the checkout$"):
        jf.load("ising-16")
    assert main(["sample", "ising-16"]) == 2
    assert said in capsys.readouterr().err
    assert main(["models"]) == 0
    assert "ising-16 cannot be loaded: " in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    doc = json.loads(capsys.readouterr().out)
    assert said in next(model for model in doc["models"] if model["name"] == "ising-16")["problem"]
    assert "ising" not in [recipe["name"] for recipe in doc["recipes"]]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ([1], "target must be a table of kind ising, not [1]"),
        ({"side": 5}, "target must be a table of kind ising"),
        (ISING | {"side": 1}, "Ising.side must be 2 or more, not 1"),
        (ISING | {"side": 4}, "target needs 16 features, not 25"),
        (ISING | {"temperature": 0.0}, "Ising.temperature must be positive"),
        (ISING | {"shift": 1.0}, "Ising.shift must be above 4 / T = 1.6, not 1.0"),
        (ISING | {"size": 4}, "target has no field 'size'"),
    ],
)
def test_targets_of_0_1_that_make_no_sense(target: object, said: str, tmp_path: Path) -> None:
    write_0_1(lattice(0.0, features=25, reach=1), tmp_path, target)
    with pytest.raises(jf.CheckpointError) as caught:
        jf.load(tmp_path)
    assert said in str(caught.value)


def test_the_bundled_checkpoint_is_the_one_of_0_1(tmp_path: Path) -> None:
    """The same weights and samples, be its config that of this release or that of 0.1."""
    flow = jf.load("ising-16")
    assert (flow.family, flow.config.temperature, flow.config.side) == ("lattice", 3.0, 16)
    write_0_1(flow, tmp_path, {"kind": "ising", "side": 16, "temperature": 3.0, "shift": 0.0})
    again = jf.load(tmp_path)
    assert again.config == flow.config
    out = flow.sample(4, seed=0, backend="torch")
    assert torch.equal(again.sample(4, seed=0, backend="torch").x, out.x)
    # As version 0.1 drew them.
    assert out.x[0, :3].tolist() == pytest.approx([-0.7444491, -2.0795968, -2.2204480], abs=1e-4)
    assert out.log_det.tolist() == pytest.approx([98.55275, 106.83083, 109.53297, 98.51592], abs=1e-3)
