"""Runs that end before their time (killed, stopped, with a state that cannot be used), or start warm."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import jacobiflow as jf
import leftovers
from jacobiflow.cli.main import main
from jacobiflow.core import processes as lock
from jacobiflow.core.files import checksum, write_text
from jacobiflow.core.processes import World
from jacobiflow.training import log, loop, state, train
from jacobiflow.training.loop import Trainer
from jacobiflow.training.recipe import Recipe
from jacobiflow.training.state import TrainingError

LONG = ("--training.epochs", "24", "--training.ema", "0.9", "--model.volume-preserving")  # 120 steps
PATIENCE = 300  # seconds
BEGINNING = (" parameters, ", " steps")  # what a run says before it fails


@contextmanager
def started(*command: object, **environment: object) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, gone at the end whatever happens."""
    environment["OMP_NUM_THREADS"] = 1
    with subprocess.Popen(
        [sys.executable, "-m", *map(str, command)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: str(value) for name, value in environment.items()},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def command(recipe: Path, out: Path, *flags: str) -> list[object]:
    return ["jacobiflow.cli.main", "train", recipe, "--out", out, *flags]


def wait_for(out: Path, step: int, process: subprocess.Popen[str]) -> None:
    """Until the log has reached `step`."""
    path, ending = out / "log.jsonl", time.monotonic() + PATIENCE
    while time.monotonic() < ending and process.poll() is None:
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.002)
    raise AssertionError(f"step {step} was not reached: {process.communicate(timeout=PATIENCE)[1]}")


def told(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log without what depends on the clock."""
    return [{k: v for k, v in entry.items() if k != "rate"} for entry in entries]


def assert_same_weights(a: Path, b: Path) -> None:
    """The states and the models of two runs are the same to the last bit."""
    for name in ("state.safetensors", "model/model.safetensors"):
        mine, its = load_file(a / name), load_file(b / name)
        assert mine.keys() == its.keys()
        assert all(torch.equal(mine[k], its[k]) for k in mine)


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory):
    out = tmp_path_factory.mktemp("undisturbed")
    return out, train(out, *LONG)


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(undisturbed, recipe, train, tmp_path):
    whole, entries = undisturbed
    steps = sorted(random.sample(range(1, 111), 2))
    print("killed at", steps)
    for step in steps:
        with started(*command(recipe, tmp_path, *LONG)) as process:
            wait_for(tmp_path, step, process)
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE)
            assert process.returncode == -signal.SIGKILL
        assert not (tmp_path / "model").exists()
    assert told(train(tmp_path, *LONG)) == told(entries)
    assert_same_weights(whole, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_its_last_step(undisturbed, recipe, train, tmp_path, number):
    whole, entries = undisturbed
    with started(*command(recipe, tmp_path, *LONG)) as process:
        wait_for(tmp_path, 9, process)
        process.send_signal(number)
        _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    assert "Traceback" not in text
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    step = max(json.loads(line)["step"] for line in lines)
    last = text.splitlines()[-1]
    assert last == f"jacobiflow train: stopped after step {step}: run the same command again to resume"
    with safe_open(tmp_path / state.FILE, framework="pt") as f:
        assert json.loads(f.metadata()["about"])["step"] == step
    assert told(train(tmp_path, *LONG)) == told(entries)
    assert_same_weights(whole, tmp_path)


# ---- the same, in this process, where it can be cut at any point


SHORT = ("--training.epochs", "4", "--training.keep-every", "9", "--training.sample-every", "8")  # 20 steps


@pytest.fixture(scope="module")
def short(train, tmp_path_factory):
    out = tmp_path_factory.mktemp("short")
    return out, train(out, *SHORT)


class Killed(BaseException):
    """What nobody catches."""


@pytest.mark.parametrize(
    ("where", "name", "call"),
    [
        (loop.Trainer, "step", 14),
        (loop.Trainer, "evaluate", 3),
        (loop.Trainer, "picture", 1),
        (state.State, "save", 2),
        (state.State, "save", 3),  # the last one: the model is there already
        (loop.Flow, "save", 1),
        (loop.Flow, "save", 3),  # the model: the last state must not be there yet
        (log.Log, "write", 13),
        (state, "save_file", 2),
    ],
)
def test_cut_anywhere(short, recipe, train, tmp_path, monkeypatch, where, name, call):
    whole, entries = short
    real, calls = getattr(where, name), 0

    def fatal(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            if name == "save_file":
                Path(args[1]).write_bytes(b"half")
            raise Killed
        return real(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(where, name, fatal)
        with pytest.raises(Killed):
            main([*map(str, command(recipe, tmp_path, *SHORT))][1:])
    assert told(train(tmp_path, *SHORT)) == told(entries)
    assert_same_weights(whole, tmp_path)
    names = [sorted(p.relative_to(out) for p in out.rglob("*")) for out in (whole, tmp_path)]
    assert names[0] == names[1]


@pytest.mark.parametrize("ema", ["0", "0.9"])
def test_the_folder_of_an_unfinished_run_is_a_model(recipe, tmp_path, monkeypatch, ema):
    """Its last saved weights, averaged if there is an average, and one line says of which step."""
    monkeypatch.setattr(loop.Trainer, "picture", None)
    seen: list[dict[str, torch.Tensor]] = []
    real = state.State.save

    def stop(self: state.State, step: int) -> None:
        real(self, step)
        if step == 14:
            seen.append({k: v.clone() for k, v in (self.average or self.model).state_dict().items()})
            raise Killed

    monkeypatch.setattr(state.State, "save", stop)
    flags = ("--training.epochs", "4", "--training.ema", ema, "--training.sample-every", "0")
    with pytest.raises(Killed):
        main([*map(str, command(recipe, tmp_path, *flags))][1:])
    kind = "averaged weights" if ema != "0" else "weights"
    with pytest.warns(
        RuntimeWarning, match=f"{tmp_path} has not finished training: these are its {kind} after step 14 of 20"
    ):
        flow = jf.load(tmp_path)
    assert flow.config.noise == "gaussian"
    assert flow.state_dict().keys() == seen[0].keys()
    assert all(torch.equal(v, seen[0][k]) for k, v in flow.state_dict().items())
    assert flow.sample(2, labels=0, plan="sequential", seed=0).x.isfinite().all()


def test_a_repeated_sigterm_does_not_cut_the_save_short(short, recipe, train, tmp_path, monkeypatch, capsys):
    whole, entries = short

    def interrupted(*args: Any, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        save_file(*args, **options)
        signal.raise_signal(signal.SIGTERM)

    def fatal(*_: object) -> None:
        raise Killed

    before = signal.signal(signal.SIGTERM, fatal)  # what the default does, but to this test only
    try:
        with monkeypatch.context() as patch:
            patch.setattr(state, "save_file", interrupted)
            assert main([*map(str, command(recipe, tmp_path, *SHORT))][1:]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err.endswith("stopped after step 7: run the same command again to resume\n")
    assert told(train(tmp_path, *SHORT)) == told(entries)
    assert_same_weights(whole, tmp_path)


def test_a_log_line_that_was_cut_off_is_written_again(short, train, tmp_path):
    whole, entries = short
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "log.jsonl"
    path.write_text(path.read_text() + '{"step": 7, "lo')
    assert train(tmp_path, *SHORT) == entries  # finished: nothing is done again
    assert_same_weights(whole, tmp_path)


def test_a_finished_run_is_not_measured_again(short, train, tmp_path, monkeypatch, capsys):
    whole, entries = short
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    before = (tmp_path / "model/profile.json").read_bytes()
    capsys.readouterr()
    assert train(tmp_path, *SHORT) == entries
    assert "measuring" not in capsys.readouterr().err
    assert (tmp_path / "model/profile.json").read_bytes() == before


def test_what_decides_nothing_may_change(short, recipe, train, tmp_path):
    whole, entries = short
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    moved = shutil.copy(recipe.with_suffix(".npz"), tmp_path)
    flags = "--training.log-every 3 --training.save-every 2 --training.validate 0 --training.accumulate 2"
    assert train(tmp_path, *SHORT, *flags.split(), "--data.source", moved) == entries


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--training.lr 0.5", "(training.lr 0.01, now 0.5)"),
        (
            "--training.batch-size 8 --training.seed 3",
            "(training.batch_size 16, now 8; training.seed 0, now 3)",
        ),
        ("--model.width 32", "(model.width 16, now 32)"),
        ("--training.ema 0.5", "(training.ema 0.0, now 0.5)"),
        ("--model.volume-preserving", "(model.volume_preserving False, now True)"),
        ("--training.start elsewhere", "(training.start , now elsewhere)"),
        ("--data.limit 40", "(training images 80, now 40; data.limit 0, now 40)"),
    ],
)
def test_a_state_of_other_settings(short, refusal, tmp_path, flags, words):
    whole, _ = short
    out = shutil.copytree(whole, tmp_path / "out")
    line = refusal("--out", out, *SHORT, *flags.split())
    assert line == f"{out} holds a run with other settings {words}: use those, or start again in a new --out"
    assert_nothing_lost(whole, out, damaged=False)


def test_the_precision_of_a_run_stays(short, refusal, tmp_path, monkeypatch):
    """It is decided at the start and a part of the state."""
    whole, _ = short
    monkeypatch.setattr(loop, "has_bfloat16", lambda device: True)
    out = shutil.copytree(whole, tmp_path / "out")
    assert "(bfloat16 False, now True)" in refusal("--out", out, *SHORT, "--training.bf16", "True")


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    at = len(data) - len(data) // 3
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


DAMAGE = {
    "empty": lambda _: b"",
    "cut off": cut,
    "one bit": flipped,
    "header": lambda data: data[:8] + b"x" + data[9:],
    "something else": lambda _: b"this is no state " * 100,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_state(short, refusal, tmp_path, kind):
    whole, _ = short
    out = shutil.copytree(whole, tmp_path / "out")
    path = out / state.FILE
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    line = refusal("--out", out, *SHORT)
    assert line.startswith(f"{path} is damaged (")
    assert line.endswith("): restore it, or start again in a new --out")
    assert_nothing_lost(whole, out, damaged=True)


@pytest.mark.parametrize("about", [None, {}, {"step": 3}, {"step": 3, "settings": {}, "checksum": 1}])
def test_a_file_that_is_not_a_state(short, refusal, tmp_path, about):
    whole, _ = short
    out = shutil.copytree(whole, tmp_path / "out")
    meta = None if about is None else {"about": json.dumps(about)}
    save_file({"x": torch.zeros(3)}, out / state.FILE, metadata=meta)
    assert "is damaged (" in refusal("--out", out, *SHORT)


@pytest.mark.parametrize("key", ["step", "settings"])
def test_step_and_settings_are_part_of_the_checksum(short, refusal, tmp_path, key):
    whole, _ = short
    out = shutil.copytree(whole, tmp_path / "out")
    with safe_open(out / state.FILE, framework="pt") as f:
        about = json.loads(f.metadata()["about"])
    about[key] = {"step": 14, "settings": {}}[key]
    save_file(load_file(out / state.FILE), out / state.FILE, metadata={"about": json.dumps(about)})
    assert "is damaged (its checksum is wrong)" in refusal("--out", out, *SHORT)


def test_a_state_of_version_1_resumes(short, recipe, train, tmp_path):
    """Its checksum is of the values only."""
    whole, entries = short
    out = shutil.copytree(whole, tmp_path / "out")
    tensors = load_file(out / state.FILE)
    with safe_open(out / state.FILE, framework="pt") as f:
        about = json.loads(f.metadata()["about"])
    del about["version"]
    about["checksum"] = checksum(tensors)
    save_file(tensors, out / state.FILE, metadata={"about": json.dumps(about)})
    assert train(out, *SHORT) == entries


@pytest.mark.slow
def test_a_full_disk(short, recipe, train, tmp_path):
    """The state does not fit: one line, and the run resumes once there is room."""
    whole, entries = short
    args = command(recipe, tmp_path, *SHORT)[1:]
    with leftovers.command(*args, before=leftovers.limited(20_000)) as process:
        _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, text
    assert "Traceback" not in text
    advice = "File too large: fix that and rerun the command to resume"
    assert text.splitlines()[-1] == f"jacobiflow train: cannot write into {tmp_path}: {advice}"
    assert not list(tmp_path.glob(".state*"))
    assert told(train(tmp_path, *SHORT)) == told(entries)
    assert_same_weights(whole, tmp_path)


def assert_nothing_lost(whole: Path, out: Path, *, damaged: bool) -> None:
    for path in whole.rglob("*"):
        if path.is_file() and not (damaged and path.name == state.FILE):
            assert (out / path.relative_to(whole)).read_bytes() == path.read_bytes()


def test_other_images_by_the_same_name(short, recipe, refusal, tmp_path):
    whole, _ = short
    out = shutil.copytree(whole, tmp_path / "out")
    with np.load(recipe.with_suffix(".npz")) as data:
        arrays = dict(data)
    arrays["x"] ^= 1
    np.savez(tmp_path / "tiny.npz", **arrays)
    line = refusal("--out", out, *SHORT, "--data.source", tmp_path / "tiny.npz")
    assert line.startswith(f"{out} holds a run with other settings (checksum of the training images ")
    assert_nothing_lost(whole, out, damaged=False)


def test_a_second_training_in_one_folder(short, refusal, tmp_path, monkeypatch):
    whole, _ = short
    out = shutil.copytree(whole, tmp_path / "out")
    monkeypatch.setattr(lock, "WAIT", 0.1)
    with lock.Lock(out) as first:
        first.exclusive()
        line = refusal("--out", out, *SHORT)
    assert line.startswith(f"{out} is in use by process {os.getpid()} on ")
    assert line.endswith(": wait for it, or use another --out")
    assert_nothing_lost(whole, out, damaged=False)


def test_processes_that_read_other_images(recipe, tmp_path, monkeypatch):
    def other(self: World, make: Any) -> Any:
        return make() | {state.CONTENT: "of the first"}

    monkeypatch.setattr(World, "share", other)
    with pytest.raises(TrainingError, match="this process has read other images than the first"):
        train.train(Recipe.load(recipe), tmp_path, torch.device("cpu"), World())


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_state_that_never_ends(short, refusal, tmp_path, make):
    whole, _ = short
    out = shutil.copytree(whole, tmp_path / "out")
    (out / state.FILE).unlink()
    make(out / state.FILE)
    assert "is damaged (it is not a plain file)" in refusal("--out", out, *SHORT)


def test_an_optimiser_of_another_shape(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.bias]["exp_avg"] = torch.zeros(3)
    state.State(tmp_path, {}, model, optimizer, None).save(1)
    with pytest.raises(TrainingError, match="its optimizer state of bias has another shape"):
        state.State(tmp_path, {}, model, torch.optim.AdamW(model.parameters()), None).load()


def test_a_folder_that_is_a_file(refusal, tmp_path):
    (tmp_path / "out").write_text("mine")
    assert "exists" in refusal("--out", tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


# ---- several processes


@pytest.mark.slow
def test_two_processes_are_as_good_as_one(recipe, train, tmp_path):
    flags = ("--training.epochs", "10", "--training.accumulate", "2", "--training.keep-every", "25")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    with started(*torchrun, *command(recipe, tmp_path / "two", *flags)) as process:
        _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    one = train(tmp_path / "one", *flags[:2])
    assert len(one) == 50
    assert sum("validation" in entry for entry in one) == 10
    assert_close(read(tmp_path / "two"), one)
    assert (tmp_path / "two/kept/step-0000025/model.safetensors").exists()
    assert sum("parameters," in line for line in text.splitlines()) == 1  # one of them talks
    assert "warning" not in text


@contextmanager
def pair(recipe, out):
    """Two processes of a training that has taken 20 steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free.getsockname()[1], "WORLD_SIZE": 2}
    line = command(recipe, out, *LONG)
    with started(*line, **meeting, RANK=0) as leader, started(*line, **meeting, RANK=1) as other:
        wait_for(out, 20, leader)
        yield leader, other


@pytest.mark.slow
def test_two_processes_stop_together_and_one_goes_on(undisturbed, recipe, train, tmp_path):
    """With averaged weights, and a prior variance that is tracked over both shares of a batch."""
    whole, entries = undisturbed
    with pair(recipe, tmp_path) as (leader, other):
        other.send_signal(signal.SIGINT)
        _, text = leader.communicate(timeout=PATIENCE)
        assert (other.wait(PATIENCE), leader.returncode) == (0, 2), text
    reached = max(entry["step"] for entry in read(tmp_path))
    assert f"stopped after step {reached}: run the same command again to resume" in text.splitlines()[-1]
    assert_close(read(tmp_path), [entry for entry in entries if entry["step"] <= reached])
    with safe_open(tmp_path / state.FILE, framework="pt") as f:
        assert json.loads(f.metadata()["about"])["step"] == reached
        var = f.get_tensor("model.var")
        assert torch.equal(var, f.get_tensor("average.var"))
    assert (var - 1).abs().max() > 0.1
    assert_close(train(tmp_path, *LONG), entries)
    mine, its = (load_file(out / "model/model.safetensors") for out in (tmp_path, whole))
    torch.testing.assert_close(mine["var"], its["var"], atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_loses_another_ends_with_one_line(undisturbed, recipe, train, tmp_path, victim):
    _, entries = undisturbed
    with pair(recipe, tmp_path) as (leader, other):
        (leader, other)[victim].send_signal(signal.SIGKILL)
        left = (other, leader)[victim]
        _, text = left.communicate(timeout=PATIENCE)
    assert left.returncode == 2, text
    said = [line for line in text.splitlines() if not any(said in line for said in BEGINNING)]
    assert said == ["jacobiflow train: another process has ended: run the same command again to resume"]
    assert_close(train(tmp_path, *LONG), entries)


@pytest.mark.slow
def test_torchrun_restarts_resume(undisturbed, recipe, tmp_path):
    _, entries = undisturbed
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "-m"]
    with started(*torchrun, *command(recipe, tmp_path, *LONG)) as process:
        wait_for(tmp_path, 20, process)
        os.kill(leftovers.children(process.pid)[1], signal.SIGKILL)
        _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    assert text.count("resuming from step ") == 1
    assert_close(read(tmp_path), entries)


@pytest.mark.slow
def test_torchrun_passes_sigterm_on(undisturbed, recipe, train, tmp_path):
    """torchrun sends it to both processes; they stop after the same step, and one of them saves it."""
    _, entries = undisturbed
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    with started(*torchrun, *command(recipe, tmp_path, *LONG, "--training.save-every", "1000")) as process:
        wait_for(tmp_path, 9, process)
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=PATIENCE)
    reached = max(entry["step"] for entry in read(tmp_path))
    line = f"jacobiflow train: stopped after step {reached}: run the same command again to resume"
    assert text.splitlines().count(line) == 1, text
    with safe_open(tmp_path / state.FILE, framework="pt") as f:
        assert json.loads(f.metadata()["about"])["step"] == reached < 120
    assert_close(train(tmp_path, *LONG), entries)


def read(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def assert_close(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    """Two logs agree to 1e-4 in every loss."""
    assert [entry["step"] for entry in a] == [entry["step"] for entry in b]
    for mine, its in zip(a, b, strict=True):
        for name in ("loss", "validation"):
            assert mine.get(name) == pytest.approx(its.get(name), abs=1e-4), mine


# ---- errors of the real command


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--training.lr", "1e30", "--training.clip", "0"), "jacobiflow train: the loss is nan"),
        (("--data.source", "/gone.npz"), "jacobiflow train: /gone.npz does not exist: give an .npz file"),
    ],
)
def test_the_command_fails_with_one_line(recipe, tmp_path, flags, words):
    with started(*command(recipe, tmp_path, *flags)) as process:
        _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2
    lines = [line for line in text.splitlines() if not any(said in line for said in BEGINNING)]
    assert len(lines) == 1
    assert lines[0].startswith(words)


def test_what_a_killed_save_left_behind_is_removed(short, train, tmp_path):
    whole, _ = short
    out = shutil.copytree(whole, tmp_path / "out")
    for name in (".state.safetensors", ".log.jsonl", "model/.model.safetensors", "samples/.step-0000008.png"):
        (out / f"{name}.0123456789abcdef").write_bytes(b"half")
    train(out, *SHORT)
    assert [p.name for p in out.rglob(".*")] == [".lock"]


def test_an_hour_later_a_write_removes_what_a_killed_one_left(tmp_path):
    old, new = (tmp_path / f".plan.json.{digit * 16}" for digit in "01")
    for path, age in ((old, 3601), (new, 3500)):
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    write_text(tmp_path / "plan.json", "{}")
    assert sorted(tmp_path.iterdir()) == [new, tmp_path / "plan.json"]


# ---- runs that begin with the weights of another flow


@pytest.fixture(scope="module")
def first(train, tmp_path_factory):
    """The folder of a run in which every tensor has moved."""
    out = tmp_path_factory.mktemp("first")
    train(out, "--training.seed", 5, "--model.volume-preserving")
    return out


def assert_weights(flow: torch.nn.Module, folder: Path) -> None:
    found, stored = flow.state_dict(), load_file(folder / "model" / "model.safetensors")
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[k], stored[k]) for k in stored)


@pytest.mark.parametrize("place", ["", "model"])
def test_a_run_begins_with_the_weights(first, train, tmp_path, monkeypatch, place):
    seen: list[Trainer] = []
    step = Trainer.step

    def watched(self: Trainer, *args: Any) -> Any:
        if not seen:
            seen.append(self)
            assert_weights(self.flow, first)
            assert self.average is not None
            assert_weights(self.average, first)
        return step(self, *args)

    monkeypatch.setattr(Trainer, "step", watched)
    flags = ("--model.volume-preserving", "--training.ema", 0.9)
    train(tmp_path / "run", "--training.start", first / place, *flags)
    assert len(seen) == 1
    with safe_open(tmp_path / "run" / state.FILE, framework="pt") as f:
        settings = json.loads(f.metadata()["about"])["settings"]
    assert settings["training.start"] == str(first / place)


def test_a_bundled_name():
    flow = jf.TarFlow(jf.load("mnist").config)
    train.take_weights(flow, "mnist")
    stored = jf.load("mnist").state_dict()
    assert all(torch.equal(value, stored[name]) for name, value in flow.state_dict().items())


def test_another_shape(first, refusal, tmp_path):
    out = tmp_path / "run"
    flags = ("--training.start", first, "--out", out)
    line = refusal(*flags, "--model.volume-preserving", "--model.width", 32)
    assert line.startswith(f"training.start {first} has another shape than the model: tensor blocks.0.")
    line = refusal(*flags)  # not volume-preserving: it has more outputs
    assert "tensor blocks.0.proj_out.bias is [16] there, [32] here" in line
    assert not out.exists()


def test_no_such_flow(refusal, tmp_path):
    line = refusal("--training.start", "nowhere", "--out", tmp_path / "run")
    assert line.startswith("no model 'nowhere': give a bundled name")


def test_a_resumed_run_needs_no_start(first, recipe, train, tmp_path, monkeypatch):
    start = shutil.copytree(first, tmp_path / "start")
    flags = (*SHORT, "--training.start", start, "--model.volume-preserving")
    whole = train(tmp_path / "whole", *flags)
    out, step = tmp_path / "cut", Trainer.step

    def killed(self: Trainer, number: int, index: torch.Tensor) -> Any:
        if number == 10:
            raise Killed
        return step(self, number, index)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        with pytest.raises(Killed):
            train(out, *flags)
    shutil.rmtree(start)
    assert told(train(out, *flags)) == told(whole)
    assert_same_weights(tmp_path / "whole", out)


@pytest.mark.slow
def test_two_processes_begin_with_the_same_weights(first, recipe, train, tmp_path):
    flags = ("--training.start", str(first), *LONG, "--training.epochs", "2")
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    with started(*torchrun, *command(recipe, tmp_path / "two", *flags)) as process:
        _, text = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, text
    assert_close(read(tmp_path / "two"), train(tmp_path / "one", *flags))
