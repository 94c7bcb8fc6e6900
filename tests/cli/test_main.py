"""`jacobiflow` itself: help, versions, and how errors end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
from jacobiflow.cli import main as program
from jacobiflow.cli import models
from jacobiflow.cli.options import listing, parse_labels, pick_device, table
from jacobiflow.flows import checkpoint
from jacobiflow.training.recipe import recipe_names
from subjects import maf

COMMANDS = list(program.COMMANDS)


@pytest.mark.parametrize("args", [["--help"], ["-h"], []])
def test_the_overview_names_every_command(run: Any, args: list[str]) -> None:
    ran = run(*args)
    assert ran.status == 0
    assert ran.err == ""
    assert max(map(len, ran.out.splitlines())) <= 80
    for name, text in program.COMMANDS.items():
        assert any(line.split() == [name, *text.split()] for line in ran.out.splitlines())
    assert "example:\n  jacobiflow sample" in ran.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_80_columns_and_has_an_example(run: Any, command: str) -> None:
    ran = run(command, "--help")
    assert ran.status == 0
    assert ran.err == ""
    assert ran.out.startswith(f"usage: jacobiflow {command} ")
    assert [line for line in ran.out.splitlines() if len(line) > 80] == []
    assert f"jacobiflow {command}" in ran.out.partition("example:")[2]
    assert "\n\n\n" not in ran.out


def test_help_uses_a_wide_terminal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = run("convert", "--help").out
    monkeypatch.setenv("COLUMNS", "160")
    wide = run("convert", "--help").out
    assert narrow.split("\n\n")[0].count("\n") == 1
    assert wide.split("\n\n")[0].count("\n") == 0
    assert "[--noise-std STD]" in narrow


def test_the_version(run: Any) -> None:
    ran = run("--version")
    assert (ran.status, ran.out) == (0, f"jacobiflow {jf.__version__}\n")


def test_an_unknown_command(run: Any) -> None:
    assert run("sampel").complaint == f"jacobiflow: no command 'sampel'; there are {', '.join(COMMANDS)}"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["sample"], "MODEL"),
        (["sample", "mnist", "--bogus"], "Unrecognized options: --bogus"),
        (["sample", "mnist", "-n", "many"], "-n/--n: invalid literal for int() with base 10: 'many'"),
        (["sample", "mnist", "-n", "2.5"], "-n/--n"),
        (["sample", "mnist", "--guide", "c"], "'c'"),
        (["sample", "mnist", "--init", "ones"], "'ones'"),
        (["sample", "mnist", "--tol"], "--tol"),
        (["sample", "mnist", "mnist"], "mnist"),
        (["convert"], "CHECKPOINT"),
        (["convert", "a.pth"], "FOLDER"),
        (["models", "--bogus"], "--bogus"),
    ],
)
def test_wrong_options_are_one_line(run: Any, args: list[str], words: str) -> None:
    text = run(*args).complaint
    assert words in text
    assert text.startswith(f"jacobiflow {args[0]}: ")
    assert text.endswith(f"; see jacobiflow {args[0]} --help")


# Errors of every kind


def broken(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(argv: Any) -> None:
        raise error

    monkeypatch.setattr(models, "main", fail)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("two\n  lines"), "two lines"),
        (TypeError("a type"), "a type"),
        (FileNotFoundError(2, "No such file", "x"), "[Errno 2] No such file: 'x'"),
        (MemoryError(), "MemoryError"),
        (jf.DecodingError(1, [0], jf.Status.NONFINITE), "block 1, samples 0: the answer overflows"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "CUDA out of memory"),
        (RuntimeError("[enforce] DefaultCPUAllocator: can't allocate memory"), "can't allocate memory"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_what_a_user_can_mend_is_one_line(
    run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    broken(monkeypatch, error)
    assert run("models").complaint.startswith("jacobiflow models: ")
    assert text in run("models").complaint
    monkeypatch.setenv("JACOBIFLOW_TRACEBACK", "1")
    with pytest.raises(type(error)):
        run("models")


@pytest.mark.parametrize("error", [RuntimeError("a bug"), AssertionError("a bug"), KeyError("a bug")])
def test_our_own_mistakes_are_not_hidden(run: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    broken(monkeypatch, error)
    with pytest.raises(type(error), match="a bug"):
        run("models")


def test_being_stopped_is_no_error_of_ours(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch, KeyboardInterrupt())
    ran = run("models")
    assert (ran.status, ran.err) == (130, "jacobiflow models: stopped\n")


def test_warnings_are_one_line_and_stay_inside(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(argv: Any) -> None:
        warnings.simplefilter("always")
        warnings.warn("look\n out", UserWarning, stacklevel=1)

    monkeypatch.setattr(models, "main", warn)
    before = warnings.showwarning
    ran = run("models")
    assert (ran.status, ran.err) == (0, "jacobiflow: warning: look out\n")
    assert warnings.showwarning is before


# Models


def test_models_lists_recipes_and_bundled_models(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "files", lambda name: tmp_path)
    assert "no models are bundled" in run("models").out
    assert json.loads(run("models", "--json").out)["models"] == []
    flow = maf(1.0, features=4, hidden=(6,))
    flow.save(tmp_path / "bundled" / "toy")
    count = sum(p.numel() for p in flow.parameters())
    ran = run("models")
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert ["toy", "maf", f"{count:,}"] in [line.split() for line in ran.out.splitlines()]
    doc = json.loads(run("models", "--json").out)
    (model,) = doc["models"]
    assert (model["name"], model["family"], model["parameters"]) == ("toy", "maf", count)
    assert model["config"]["features"] == 4
    assert [r["name"] for r in doc["recipes"]] == recipe_names()
    for recipe in doc["recipes"]:
        assert recipe["name"] in ran.out
        assert recipe["about"].split()[0] in ran.out


# Pieces


def test_labels_in_turn() -> None:
    def labels(text: str, n: int) -> list[int]:
        found = parse_labels(text, n, 10)
        assert found is not None
        return found.tolist()

    assert labels("3", 3) == [3, 3, 3]
    assert labels("0-9", 12) == [*range(10), 0, 1]
    assert labels("0,2,5-7", 4) == [0, 2, 5, 6]
    assert labels(" 1 , 3-4 ", 3) == [1, 3, 4]
    assert labels("9-9", 1) == [9]
    assert parse_labels(None, 3, 10) is None
    assert parse_labels("none", 3, 0) is None


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1-2-3", "0.5", "²", "٣", "1e3", "1" * 30])
def test_labels_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="--labels takes numbers and ranges such as 0-9"):
        parse_labels(text, 4, 10)


def test_labels_that_the_model_does_not_have() -> None:
    for text, part in (("10", "10"), ("0-10", "0-10"), ("1,99", "99"), ("5-3", "5-3")):
        with pytest.raises(ValueError, match=f"--labels {part} is outside 0-9"):
            parse_labels(text, 4, 10)
    with pytest.raises(ValueError, match="takes no labels: leave --labels out"):
        parse_labels("1", 4, 0)


def test_devices() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type in ("cpu", "cuda")
    for name in ("gpu", "", "cpu:x", "cuda:-2"):
        with pytest.raises(ValueError, match="--device must be auto, cpu, cuda"):
            pick_device(name)
    for name in ("cuda:99", "xpu", "meta"):
        with pytest.raises(ValueError, match=f"--device {name}: this torch sees no such device"):
            pick_device(name)


def test_tables_and_lists_line_up(monkeypatch: pytest.MonkeyPatch) -> None:
    text = table([("name", "n"), ("a", "1"), ("longer", "100")])
    assert text.splitlines() == ["name      n", "------  ---", "a         1", "longer  100"]
    monkeypatch.setenv("COLUMNS", "30")
    text = listing([("a", "one two three four five six seven"), ("long", "short")])
    assert text.splitlines() == ["  a     one two three four", "        five six seven", "  long  short"]
    assert listing([]) == ""


# For real


def real(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=env)


@pytest.mark.slow
def test_the_installed_program_ends_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("jacobiflow")
    ran = real([str(script), "sample", str(tmp_path / "nothing")])
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("jacobiflow sample: no model ")
    assert ran.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_closed_pipe_is_quiet() -> None:
    command = f"set -o pipefail; {sys.executable} -m jacobiflow.cli.main models --json | true"
    ran = real(["bash", "-c", command])
    assert (ran.returncode, ran.stderr) in ((0, ""), (1, ""))


HEAVY = ("matplotlib", "tyro", "PIL", "datasets", "huggingface_hub", "tensorboard", "torchvision", "sklearn")


@pytest.mark.slow
def test_importing_jacobiflow_imports_little_beyond_torch() -> None:
    code = (
        "import sys, json, torch, numpy, safetensors.torch; before = set(sys.modules); import jacobiflow; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    ran = real([sys.executable, "-c", code])
    new = json.loads(ran.stdout)
    assert not {name.partition(".")[0] for name in new} & set(HEAVY)
    others = {n.partition(".")[0] for n in new} - {"jacobiflow"} - set(sys.stdlib_module_names)
    assert not others
