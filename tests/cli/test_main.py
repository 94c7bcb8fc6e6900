"""`jacobiflow` itself: help, versions, and how errors end."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import jacobiflow as jf
from commands import read
from jacobiflow.cli import main as program
from jacobiflow.cli import models
from jacobiflow.cli.options import label_cycle, pick_device
from jacobiflow.core.tables import listing, table
from jacobiflow.flows import bundled, checkpoint
from jacobiflow.jobs.sampling import labels_in_turn
from jacobiflow.training.recipe import recipe_names
from subjects import maf

COMMANDS = list(program.COMMANDS)
EXAMPLE = re.compile(r"^(?:example:)?\s*(jacobiflow .*)$", re.MULTILINE)


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
    examples = [line for line in EXAMPLE.findall(ran.out) if f"jacobiflow {command} " in line + " "]
    assert examples
    for line in examples:
        read(line)
    assert "\n\n\n" not in ran.out


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"train"}))
def test_help_names_an_option_once_and_what_it_takes(run: Any, command: str) -> None:
    text = run(command, "--help").out
    assert not re.search(r"-n N, --n|--n N, -n", text)
    assert not re.search(r"\b(STR|INT|FLOAT|PATH)\b", text)


@pytest.mark.parametrize("recipe", recipe_names())
def test_the_help_of_a_recipe_fits_80_columns_too(run: Any, recipe: str) -> None:
    ran = run("train", recipe, "--help")
    assert ran.status == 0
    assert [line for line in ran.out.splitlines() if len(line) > 80] == []
    assert "--json" in ran.out


@pytest.mark.parametrize("command", sorted(set(COMMANDS) - {"app"}))
def test_every_command_that_reports_has_json_for_programs(run: Any, command: str) -> None:
    assert "--json" in run(command, *(["mnist-cpu"] if command == "train" else []), "--help").out


def test_what_is_off_needs_no_flag_that_says_so(run: Any) -> None:
    assert "--no-json" not in run("models", "--help").out
    assert "--training.no-flip" in run("train", "mnist-cpu", "--help").out  # a recipe may say either


def test_flags_say_what_they_do(run: Any) -> None:
    assert "--no-denoise Keep the noise of training" in " ".join(run("evaluate", "--help").out.split())


def test_help_uses_a_wide_terminal(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = run("bench", "--help").out
    monkeypatch.setenv("COLUMNS", "160")
    wide = run("bench", "--help").out
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, wide.splitlines())) <= 160
    assert wide.count("\n") < narrow.count("\n")
    assert "[--json]" in run("models", "--help").out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_no_default_that_says_nothing(run: Any, command: str) -> None:
    for args in ([command], [command, "mnist-cpu"]) if command == "train" else ([command],):
        text = " ".join(run(*args, "--help").out.split())
        shown = re.findall(r"[(]default: ?(.*?)[)]", text)
        assert not {"None", "''", ""} & set(shown)
        assert len(args) == 2 or "False" not in shown  # a flag of a recipe has an opposite


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version(run: Any, flag: str) -> None:
    ran = run(flag)
    assert (ran.status, ran.out) == (0, f"jacobiflow {jf.__version__}\n")


def test_an_unknown_command(run: Any) -> None:
    told = run("sampel").complaint
    assert told == f"jacobiflow: no command 'sampel' (did you mean sample?); there are {', '.join(COMMANDS)}"
    assert "did you mean" not in run("xyz").complaint


def test_names_that_are_nearly_right(run: Any) -> None:
    assert "no model 'mnits' (did you mean mnist?): " in run("sample", "mnits").complaint
    assert "no recipe is called 'mnist-cp' (did you mean mnist-cpu?): " in run("train", "mnist-cp").complaint
    plan = run("sample", "mnist", "--plan", "no.json").complaint
    assert plan == "jacobiflow sample: cannot read the plan no.json: No such file or directory"
    plan = run("sample", "mnist", "--plan", "selectiv").complaint
    assert "no plan is called 'selectiv' (did you mean selective?): " in plan


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["sample"], "missing: MODEL"),
        (["sample", "mnist", "--bogus"], "--bogus is not an option"),
        (["sample", "mnist", "-n", "many"], "-n must be a whole number, not 'many'"),
        (["sample", "mnist", "-n", "2.5"], "-n must be a whole number, not '2.5'"),
        (["sample", "mnist", "--guide", "c"], "--guide must be one of a, ab, b, not 'c'"),
        (
            ["sample", "mnist", "--init", "ones"],
            "--init must be one of calibrated, noise, previous, zeros, not 'ones'",
        ),
        (["sample", "mnist", "--tol"], "--tol needs a value"),
        (["sample", "mnist", "--tol", "a"], "--tol must be a number, not 'a'"),
        (["sample", "mnist", "--batch", "x"], "--batch must be a whole number, not 'x'"),
        (["sample", "mnist", "--plna", "auto"], "--plna is not an option (did you mean --plan?)"),
        (["sample", "mnist", "--thread", "3", "--lables", "1"], "(did you mean --threads?)"),
        (["sample", "mnist", "--plan", "uniform", "selective"], "selective is not an option"),
        (
            ["sample", "mnist", "--format", "jpeg"],
            "--format must be one of npz, png, safetensors, not 'jpeg'",
        ),
        (["sample", "mnist", "mnist"], "mnist is not an option"),
        (["convert"], "missing: CHECKPOINT and FOLDER"),
        (["convert", "a.pth"], "missing: FOLDER"),
        (["models", "--bogus"], "--bogus is not an option"),
    ],
)
def test_wrong_options_are_one_line(run: Any, args: list[str], words: str) -> None:
    told = run(*args).complaint
    prefix, suffix = f"jacobiflow {args[0]}: ", f"; see jacobiflow {args[0]} --help"
    assert told.startswith(prefix)
    assert told.endswith(words + suffix)
    assert len(told) < len(prefix + suffix) + 90  # nothing of the help text


# Completion


def complete(script: str, line: str, cwd: Path) -> set[str]:
    """What Tab offers after `line`."""
    words = " ".join(shlex.quote(word) for word in line.split(" "))
    code = (
        f"source {script}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
        "_tyro_jacobiflow; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    ran = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, cwd=cwd)
    assert ran.stderr == ""
    return set(ran.stdout.split())


def test_tab_completes_names_options_and_files(run: Any, tmp_path: Path) -> None:
    ran = run("--completion", "bash")
    assert ran.status == 0
    (tmp_path / "done.bash").write_text(ran.out)
    (tmp_path / "mnist.npz").touch()

    def offered(line: str) -> set[str]:
        return complete("done.bash", line, tmp_path)

    assert offered("jacobiflow ") == {*COMMANDS, "-h", "--help"}
    assert offered("jacobiflow t") == {"tune", "train"}
    assert offered("jacobiflow sample m") == {"mnist", "mnist-maf", "mnist-small"}
    assert offered("jacobiflow train mnist-c") == {"mnist-cpu"}
    assert offered("jacobiflow sample mnist --pl") == {"--plan"}
    assert offered("jacobiflow sample mnist --plan s") == {"sequential", "selective"}
    assert offered("jacobiflow sample a/folder --att") == {"--attn-temp"}
    assert offered("jacobiflow bench mnist --plan uniform s") == {"sequential", "selective"}
    assert offered("jacobiflow bench mnist --init ") >= {"zeros", "noise", "previous"}
    assert offered("jacobiflow train ising --model.te") == {"--model.temperature"}
    assert offered("jacobiflow train mnist-cpu --data.source mn") == {"mnist.npz"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_names(run: Any, shell: str) -> None:
    ran = run("--completion", shell)
    assert ran.status == 0
    for name in (*COMMANDS, "mnist-maf", "mnist-cpu", "max-deviation", "training.epochs", "selective"):
        assert name in ran.out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=ran.out, text=True, check=True)


@pytest.mark.parametrize("args", [[], ["csh"], ["bash", "zsh"]])
def test_a_shell_that_is_not_known(run: Any, args: list[str]) -> None:
    assert run("--completion", *args).complaint == "jacobiflow --completion takes one of bash, zsh, fish"


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


def test_models_lists_recipes_and_bundled_models(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checkpoint, bundled):
        monkeypatch.setattr(module, "files", lambda name: tmp_path)
    assert "no models are installed" in run("models").out
    assert json.loads(run("models", "--json").out)["models"] == []
    flow = maf(1.0, features=4, hidden=(6,))
    flow.save(tmp_path / "toy")
    ran = run("models")
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert ran.out.startswith(f"{jf.models()!r}\n\n")
    doc = json.loads(run("models", "--json").out)
    (model,) = doc["models"]
    count = sum(p.numel() for p in flow.parameters())
    assert (model["name"], model["family"], model["parameters"]) == ("toy", "maf", count)
    assert model["backend"] == flow.sample(1, plan="sequential").stats.backend
    assert model["config"]["features"] == 4
    assert [r["name"] for r in doc["recipes"]] == recipe_names()
    for recipe in doc["recipes"]:
        assert recipe["name"] in ran.out
        assert recipe["about"].split()[0] in ran.out


# Pieces


def test_labels_in_turn() -> None:
    def labels(text: str, n: int) -> list[int]:
        found = labels_in_turn(label_cycle(text, 10), range(n))
        assert found is not None
        return found.tolist()

    assert labels("3", 3) == [3, 3, 3]
    assert labels("0-9", 12) == [*range(10), 0, 1]
    assert labels("0,2,5-7", 4) == [0, 2, 5, 6]
    assert labels(" 1 , 3-4 ", 3) == [1, 3, 4]
    assert labels("9-9", 1) == [9]
    assert labels_in_turn(label_cycle(None, 10), range(3)) is None
    assert label_cycle("none", 0) == ()


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1-2-3", "0.5", "²", "٣", "1e3", "1" * 30])
def test_labels_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="--labels takes numbers and ranges such as 0-9"):
        label_cycle(text, 10)


def test_a_number_that_is_the_name_of_another_class() -> None:
    names = ("0", "1", "10", "2")  # of folders, in their order
    assert label_cycle("0,1,10-10", 20, names) == (0, 1, 10)
    for text, ways in (("2", "3-3 for the class, 2-2 for the number"), ("0,10", "2-2 for the class, 10-10 for the")):
        with pytest.raises(ValueError, match=f"--labels {text[-2:].strip(',')} may mean a number or .* give {ways}"):
            label_cycle(text, 20, names)


def test_labels_that_the_model_does_not_have() -> None:
    for text, part in (("10", "10"), ("0-10", "0-10"), ("1,99", "99"), ("5-3", "5-3")):
        with pytest.raises(ValueError, match=f"--labels {part} is outside 0-9"):
            label_cycle(text, 10)
    with pytest.raises(ValueError, match="takes no labels: leave --labels out"):
        label_cycle("1", 0)


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


def test_tables_fit_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are folded first, then texts; numbers are whole; what has no room is in a further table."""
    rows = [
        ("model", "plan", "time per batch", "largest deviation"),
        ("a", "one of several words", "0.123 ± 0.045", "1e-05"),
        ("", "two", "0.1", "0"),
    ]
    monkeypatch.setenv("COLUMNS", "50")
    assert table(rows).splitlines() == [
        "model  plan                 time per    largest",
        "                               batch  deviation",
        "-----  --------------  -------------  ---------",
        "a      one of several  0.123 ± 0.045      1e-05",
        "       words",
        "       two                       0.1          0",
    ]
    monkeypatch.setenv("COLUMNS", "30")
    assert table(rows).splitlines() == [
        "model  plan          time per",
        "                        batch",
        "-----  -------  -------------",
        "a      one of   0.123 ± 0.045",
        "       several",
        "       words",
        "       two                0.1",
        "",
        "model  plan       largest",
        "                deviation",
        "-----  -------  ---------",
        "a      one of       1e-05",
        "       several",
        "       words",
        "       two              0",
    ]


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


PROGRAM = f"{sys.executable} -m jacobiflow"


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", ["--help", "--completion bash", "models --json", "bench --help"])
def test_a_closed_pipe_is_quiet(args: str, unbuffered: str) -> None:
    ran = real(["bash", "-c", f"set -o pipefail; PYTHONUNBUFFERED={unbuffered} {PROGRAM} {args} | true"])
    assert (ran.returncode, ran.stderr) in ((0, ""), (1, ""))


@pytest.mark.slow
def test_output_that_nobody_wants_is_left_out() -> None:
    ran = real(["bash", "-c", f"{PROGRAM} models >&-"])
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.slow
def test_being_stopped_during_imports_is_quiet(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from jacobiflow_command import run; run()"
    ran = real([sys.executable, "-c", code])
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "jacobiflow: stopped\n")


HEAVY = (
    *("matplotlib", "tyro", "PIL", "torchvision", "sklearn"),
    *("datasets", "huggingface_hub", "tensorboard", "gradio", "transformers", "torchmetrics", "diffusers"),
)


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


@pytest.mark.parametrize("command", ["evaluate", "analyze", "reproduce", "app"])
def test_a_command_of_the_lab_names_its_distribution(run: Any, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "entry_points", lambda **_: [])
    told = run(command, "mnist").complaint
    assert told == f"jacobiflow {command}: this command belongs to jacobiflow-lab: pip install ./lab in the checkout"
