"""The wheels: each holds its whole package, and together they work without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import jacobiflow as jf
from jacobiflow.flows.checkpoint import bundled_names
from jacobiflow.training.recipe import recipe_names

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = {"jacobiflow": ROOT, "jacobiflow_lab": ROOT / "lab", "jacobiflow_models": ROOT / "models"}


def call(*args: object, cwd: Path, **env: str) -> str:
    ran: Any = subprocess.run(
        [sys.executable, *map(str, args)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"} | env,
    )
    assert ran.returncode == 0, ran.stderr
    return str(ran.stdout)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("dist")
    for project in DISTRIBUTIONS.values():
        call("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project, cwd=folder)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


def install(site: Path, *found: Path) -> dict[str, str]:
    """The environment in which these wheels, and nothing of the repository, are on the path."""
    call("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, *found, cwd=site.parent)
    return {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_wheel_holds_its_whole_package(wheels: dict[str, Path], name: str) -> None:
    package = DISTRIBUTIONS[name] / "src" / name
    with zipfile.ZipFile(wheels[name]) as archive:
        names = set(archive.namelist())
        about = next(n for n in names if n.endswith(".dist-info/METADATA"))
        text = archive.read(about).decode()
    assert wheels[name].name == f"{name}-{jf.__version__}-py3-none-any.whl"
    assert f"Version: {jf.__version__}\n" in text
    files = {p.relative_to(package.parent).as_posix() for p in package.rglob("*") if p.is_file()}
    files = {file for file in files if "__pycache__" not in file}
    command = {"jacobiflow_command.py"} if name == "jacobiflow" else set()
    assert {n for n in names if ".dist-info/" not in n} == files | command
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names)


@pytest.mark.slow
def test_what_each_wheel_brings(wheels: dict[str, Path]) -> None:
    inside = {name: zipfile.ZipFile(path).namelist() for name, path in wheels.items()}
    for name in recipe_names():
        of_lab = f"jacobiflow_lab/lattice/recipes/{name}.toml" in inside["jacobiflow_lab"]
        assert of_lab != (f"jacobiflow/training/recipes/{name}.toml" in inside["jacobiflow"])
    assert "jacobiflow/py.typed" in inside["jacobiflow"]
    assert "jacobiflow_lab/py.typed" in inside["jacobiflow_lab"]
    assert not any(file.endswith(".safetensors") for file in inside["jacobiflow"])
    for name in bundled_names():
        for file in ("config.json", "model.safetensors", "README.md"):
            assert f"jacobiflow_models/{name}/{file}" in inside["jacobiflow_models"]


@pytest.mark.slow
def test_library_and_models_work_without_the_lab(wheels: dict[str, Path], tmp_path: Path) -> None:
    alone = install(tmp_path / "site", wheels["jacobiflow"], wheels["jacobiflow_models"])
    code = "import jacobiflow.cli.main as program; print(program.__file__); program.main(['models'])"
    where, _, listed = call("-c", code, cwd=tmp_path, **alone).partition("\n")
    assert Path(where).is_relative_to(tmp_path / "site")
    assert all(name in listed for name in [*recipe_names(), *bundled_names()])
    out = call("-m", "jacobiflow.cli.main", "sample", "mnist-small", "-n", 4, cwd=tmp_path, **alone)
    assert out.startswith("4 samples, plan auto")
    assert (tmp_path / "out" / "samples.png").stat().st_size > 100


@pytest.mark.slow
def test_the_lab_adds_its_commands(wheels: dict[str, Path], tmp_path: Path) -> None:
    all_of_them = install(tmp_path / "site", *wheels.values())
    for command in ("evaluate", "analyze", "reproduce", "app"):
        code = f"import jacobiflow.cli.main as program; print(program.find({command!r}).__file__)"
        where = call("-c", code, cwd=tmp_path, **all_of_them)
        assert Path(where.strip()) == tmp_path / "site" / "jacobiflow_lab" / "cli" / f"{command}.py"
