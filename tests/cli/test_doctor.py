"""`jacobiflow doctor`: it finds what is wrong and says what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow.cli import doctor
from jacobiflow.core import hardware, results
from jacobiflow.kernels import build

NOBODY = 54321  # a user that has no account


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_warned", set())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def problems(ran: Any) -> list[str]:
    return list(json.loads(ran.out)["problems"])


def test_all_good(run: Any) -> None:
    ran = run("doctor")
    assert ran.status == 0
    assert ran.out.endswith("\n\nall good\n")
    assert max(map(len, ran.out.splitlines())) <= 80
    for text in (jf.__version__, torch.__version__, "backend c", *doctor.OURS, *doctor.OTHERS):
        assert text in ran.out
    doc = json.loads(run("doctor", "--json").out)
    assert doc["problems"] == []
    assert doc["versions"]["torch"] == torch.__version__
    assert doc["threads"] == {"count": 1, "cores": hardware.available_cores(), "OMP_NUM_THREADS": "1"}
    assert doc["cpu"]["backend"] == "c"
    assert 0 < doc["cpu"]["deviation"] < 1e-4  # of sweeps with a small tol: compared, and not with themselves


def test_it_changes_no_random_numbers() -> None:
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    doctor.small_flows()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_what_the_home_folder_is_called_stays_private(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path(doctor.__file__).parents[3]
    monkeypatch.setenv("HOME", str(home))
    assert str(home) not in run("doctor").out
    assert "jacobiflow in ~/" in " ".join(run("doctor").out.split())
    told = run("doctor", "--json").out  # people paste this, too
    assert str(home) not in told
    assert json.loads(told)["system"]["package"].startswith("~/")
    monkeypatch.setenv("HOME", str(home)[:-1])  # the beginning of another folder's name
    assert doctor.without_home(str(home)) == str(home)
    assert doctor.without_home(f"in {home.parent}/x and {str(home)[:-1]}") == f"in {home.parent}/x and ~"
    monkeypatch.setenv("HOME", "/")
    assert doctor.without_home("/a/b") == "/a/b"


# The machine


@pytest.mark.parametrize("cc", ["/nowhere/cc", 'gcc "-O2'])
def test_a_compiler_that_does_not_run(run: Any, monkeypatch: pytest.MonkeyPatch, cc: str) -> None:
    monkeypatch.setenv("CC", cc)
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    ran = run("doctor")
    assert "does not run" in ran.out
    assert "1 problem:\n  - the C kernels are not used (they could not be built: " in ran.out


def test_kernels_that_are_switched_off_are_no_problem(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JACOBIFLOW_NATIVE", "0")
    monkeypatch.setattr(build, "library", build.library.__wrapped__)
    ran = run("doctor")
    assert (ran.status, "off, because JACOBIFLOW_NATIVE=0" in ran.out) == (0, True)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("abc", "OMP_NUM_THREADS='abc' is not"),
        ("0", "OMP_NUM_THREADS='0' is not"),
        ("5", "more threads than cores (5 on 4)"),
    ],
)
def test_wrong_threads(run: Any, monkeypatch: pytest.MonkeyPatch, setting: str, said: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    monkeypatch.setattr(doctor, "available_cores", lambda: 4)
    (problem,) = problems(run("doctor", "--json"))
    assert said in problem
    assert problem.endswith((": set it to 4", ": set OMP_NUM_THREADS=4"))
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert run("doctor").status == 0


def test_cores_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "CONTROL", tmp_path)
    own = hardware.available_cores()
    for text, cores in (("max 100000", own), ("50000 100000", 1), ("100000 100000", 1), ("", own)):
        (tmp_path / "cpu.max").write_text(text)
        assert hardware.available_cores() == cores


def test_versions_that_do_not_belong_together(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"jacobiflow-models": "0.0.1", "jacobiflow-lab": None}
    monkeypatch.setattr(doctor, "installed", lambda name: found.get(name, "1"))
    (problem,) = problems(run("doctor", "--json"))
    assert problem == "the versions differ: pip install ./models in the checkout"
    assert "jacobiflow-lab not installed" in " ".join(run("doctor").out.split())


# The cache folder


def test_stored_files_are_counted(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache/costs").mkdir(parents=True, mode=0o700)
    for name in "ab":
        (tmp_path / "cache/costs" / f"{name}.json").touch()
    doc = json.loads(run("doctor", "--json").out)
    assert doc["cache"]["stored"]["costs"] == 2  # not the file that it tried to write
    assert "costs 2" in run("doctor").out


def test_an_unsafe_cache_folder(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("JACOBIFLOW_CACHE", str(tmp_path / "open"))
    (problem,) = problems(run("doctor", "--json"))
    assert "others can write to it" in problem
    assert "set JACOBIFLOW_CACHE to a folder that only you can write" in problem


def real(*, user: int | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which becomes another user after its imports."""
    code = (
        "import os, sys, pwd, json, jacobiflow.cli.doctor, jacobiflow.cli.main as program\n"
        f"if {user!r} is not None: os.setgid({user!r}); os.setuid({user!r})\n"
        "sys.exit(program.main(['doctor']))"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k not in ("HOME", "CC")} | {"COLUMNS": "1000"} | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.slow
def test_no_compiler(tmp_path: Path) -> None:
    ran = real(PATH=str(tmp_path))
    assert ran.returncode == 1, ran.stderr
    assert "1 problem:\n  - the C kernels are not used (no C compiler was found)" in ran.stdout
    assert "install a C compiler or set CC" in ran.stdout
    assert "backend torch, self-check deviates by" in ran.stdout


@pytest.mark.slow
def test_a_read_only_cache_folder() -> None:
    user = NOBODY if os.getuid() == 0 else None  # root can write anywhere
    with tempfile.TemporaryDirectory() as room:
        cache = Path(room).resolve() / "cache"
        for folder in (cache, cache / "native", cache / "costs"):
            folder.mkdir()
            if user is not None:
                os.chown(folder, user, user)
        for folder in (cache / "native", cache / "costs", cache):
            folder.chmod(0o500)
        cache.parent.chmod(0o755)
        ran = real(user=user, JACOBIFLOW_CACHE=str(cache))
        for folder in (cache, cache / "native", cache / "costs"):
            folder.chmod(0o700)
    assert ran.returncode == 1, ran.stderr
    assert f"the cache folder {cache} cannot be written to (Permission denied)" in ran.stdout
    assert "set JACOBIFLOW_CACHE to a folder of your own" in ran.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can be a user without an account")
def test_no_home() -> None:
    ran = real(user=NOBODY, JACOBIFLOW_CACHE="", XDG_CACHE_HOME="")
    assert ran.returncode == 1, ran.stderr
    assert "1 problem:\n  - the cache folder is not used (the user has no home folder)" in ran.stdout


# Devices


def test_a_device_that_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "devices", lambda: [torch.device("cpu"), torch.device("meta")])
    ran = run("doctor")
    assert "1 problem:\n  - decoding on meta fails (" in ran.out
    assert "update its driver and torch" in " ".join(ran.out.split())
    assert "cpu " in ran.out


def test_a_device_that_computes_wrongly(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoiled(flow: jf.Flow) -> jf.Flow:
        copy = deepcopy(flow)
        with torch.no_grad():
            for p in copy.parameters():
                p.mul_(1.1)
        return copy

    monkeypatch.setattr(doctor, "deepcopy", spoiled)
    ran = run("doctor")
    assert ran.status == 1
    assert "1 problem:\n  - samples of cpu with backend c deviate by " in ran.out


def test_a_device_that_computes_nan(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "deviation_on", lambda *_: ("c", torch.tensor(float("nan"))))
    (problem,) = problems(run("doctor", "--json"))
    assert problem.startswith("samples of cpu with backend c deviate by nan: ")
