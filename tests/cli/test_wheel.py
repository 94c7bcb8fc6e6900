"""The wheel: all that the package needs is in it, and it works without the repository."""

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
from subjects import tarflow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "jacobiflow"


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
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        about = next(n for n in names if n.endswith(".dist-info/METADATA"))
        text = archive.read(about).decode()
        scripts = archive.read(about.replace("METADATA", "entry_points.txt")).decode()
    assert wheel.name == f"jacobiflow-{jf.__version__}-py3-none-any.whl"
    assert f"Version: {jf.__version__}\n" in text
    assert "jacobiflow = jacobiflow.cli.main:run" in scripts
    files = {p.relative_to(PACKAGE.parent).as_posix() for p in PACKAGE.rglob("*") if p.is_file()}
    files = {name for name in files if "__pycache__" not in name}
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == files
    assert "jacobiflow/py.typed" in inside
    for name in recipe_names():
        assert f"jacobiflow/training/recipes/{name}.toml" in inside
    for name in bundled_names():
        for file in ("config.json", "model.safetensors", "README.md"):
            assert f"jacobiflow/bundled/{name}/{file}" in inside


@pytest.mark.slow
def test_the_wheel_works_on_its_own(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    call("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    alone = {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    code = "import jacobiflow.cli.main as program; print(program.__file__); program.main(['models'])"
    where, _, listed = call("-c", code, cwd=tmp_path, **alone).partition("\n")
    assert Path(where).is_relative_to(site)
    assert all(name in listed for name in [*recipe_names(), *bundled_names()])
    model = "mnist"
    if model not in bundled_names():
        model = "model"
        shape = {"image_size": 4, "width": 8, "head_dim": 4, "blocks": 2, "layers_per_block": 1}
        tarflow(0.2, **shape).save(tmp_path / model)
    out = call("-m", "jacobiflow.cli.main", "sample", model, "-n", 4, cwd=tmp_path, **alone)
    assert out.startswith("plan ")
    assert (tmp_path / "out" / "selective.png").stat().st_size > 100
