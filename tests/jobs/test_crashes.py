"""Real jobs that are killed, stopped, or cannot write; then they go on, and nothing is lost."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leftovers import PATIENCE, SMALL, children, command, files, limited, samples
from zygote import Zygote

KILLS = 20
N, SHARD = 1600, 10
LONG = ("--format", "npz", "-n", N, "--labels", "0-2", "--shard", SHARD, "--batch", "5", "--seed", "1")


@pytest.fixture
def zygote(tmp_path: Path) -> Iterator[Zygote]:
    with Zygote(tmp_path / "log") as made:
        yield made


def ends(zygote: Zygote, pids: list[int]) -> list[int]:
    """With which status these processes end."""
    return [end.status for end in zygote.wait(pids)]


def records(out: Path) -> int:
    return len(list(out.glob("records/*.json")))


@contextmanager
def impatience() -> Iterator[Any]:
    """A check that fails when it has taken far too long."""
    ending = time.monotonic() + PATIENCE

    def check() -> None:
        assert time.monotonic() < ending
        time.sleep(0.001)

    yield check


@pytest.mark.slow
def test_twenty_kills(flow: Any, zygote: Zygote, tmp_path: Path) -> None:
    """Each at a random moment of a job of two processes: one is killed, or both.

    torchrun, when a process dies, ends the others with SIGTERM; so does this test.
    """
    draw = random.Random()
    out, whole = tmp_path / "out", tmp_path / "whole"
    last = N // SHARD // 2  # so that no strike comes after the end
    moments = sorted(draw.randrange(last) for _ in range(KILLS))  # finished shards at which to strike
    moments[0] = 0  # the first time before anything is finished
    print("killed at", moments)
    for moment in moments:
        pids = zygote.start("sample", flow[1], *LONG, "--out", out, processes=2)
        with impatience() as wait:
            while records(out) < moment:
                wait()
        time.sleep(draw.random() * 0.1)
        victims = draw.choice([pids[:1], pids[1:], pids])
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        for pid in set(pids) - set(victims):
            os.kill(pid, signal.SIGTERM)
        assert -signal.SIGKILL in ends(zygote, pids), zygote.log.read_text()
        assert "Traceback" not in zygote.log.read_text()
    assert records(out) < N // SHARD
    assert ends(zygote, zygote.start("sample", flow[1], *LONG, "--out", out, processes=2)) == [0, 0]
    assert ends(zygote, zygote.start("sample", flow[1], *LONG, "--out", whole)) == [0]
    found, want = samples(out), samples(whole)
    assert found["index"].tolist() == list(range(N))  # none missing, none twice
    assert np.array_equal(found["x"], want["x"])
    assert files(out) == files(whole)


@pytest.mark.slow
def test_torchrun(flow: Any, job: Any, tmp_path: Path) -> None:
    """The command of the documentation: the same files as one process writes; one process talks."""
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "jacobiflow.cli.main"]
    ran = subprocess.run(
        [sys.executable, "-m", *torchrun, "sample", flow[1], *SMALL, "--out", tmp_path / "two"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("22 samples in 3 shards") == 1
    assert ran.stderr.count("on 2 x cpu with 1 thread") == 1
    assert job(tmp_path / "one", *SMALL)[0] == 0
    assert files(tmp_path / "one") == files(tmp_path / "two")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_restarts_resume(flow: Any, zygote: Zygote, tmp_path: Path, rank: int) -> None:
    """A process is killed; torchrun starts both again, and they make what is missing."""
    out, whole = tmp_path / "out", tmp_path / "whole"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    args = ["sample", flow[1], *LONG, "--out", out]
    with subprocess.Popen(
        [*map(str, (sys.executable, "-m", *torchrun, "-m", "jacobiflow.cli.main", *args))],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        with impatience() as wait:
            while records(out) < 3:
                wait()
        made = {p.name: p.stat().st_mtime_ns for p in out.glob("records/*.json")}
        os.kill(children(process.pid)[rank], signal.SIGKILL)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, err
    assert err.count("1,600 samples in 160 shards of 10, batches of 5") == 2  # it was begun again
    assert made.items() <= {p.name: p.stat().st_mtime_ns for p in out.glob("records/*.json")}.items()
    assert ends(zygote, zygote.start("sample", flow[1], *LONG, "--out", whole)) == [0]
    assert files(out) == files(whole)


def begun(zygote: Zygote, out: Path, *command: object) -> list[int]:
    """Two processes of a job that has made its first shard."""
    pids = zygote.start(*command, processes=2)
    with impatience() as wait:
        while records(out) < 1:
            wait()
    return pids


@pytest.mark.slow
def test_other_runs_while_one_is_at_work(flow: Any, zygote: Zygote, tmp_path: Path) -> None:
    """A second job is refused; Ctrl-C ends the first at a shard's end, in both of its processes."""
    out, endless = tmp_path / "out", (*LONG, "-n", 90_000, "--out", tmp_path / "out")
    pids = begun(zygote, out, "sample", flow[1], *endless)
    first, zygote.log = zygote.log, tmp_path / "second"
    assert ends(zygote, zygote.start("sample", flow[1], *endless)) == [2]
    assert zygote.log.read_text().startswith(f"jacobiflow sample: {out} is in use by process {pids[0]} on ")
    for pid in pids:
        os.kill(pid, signal.SIGINT)
    assert ends(zygote, pids) == [2, 0]
    line = first.read_text().splitlines()[-1]
    assert line.endswith(f" of 90,000 samples in {out}: rerun the command to resume")
    done = int(line.split("stopped with ")[1].split(" of ")[0].replace(",", ""))
    assert 0 < done <= len(samples(out)["index"]) == SHARD * records(out)


@pytest.mark.slow
def test_processes_that_lose_their_first(flow: Any, zygote: Zygote, tmp_path: Path) -> None:
    """Those that are left finish what they have begun, and say so; what is refused is told once."""
    out, flags = tmp_path / "out", (*LONG, "-n", 100, "--out", tmp_path / "out")
    pids = begun(zygote, out, "sample", flow[1], *flags)
    os.kill(pids[0], signal.SIGKILL)
    killed, left = ends(zygote, pids)
    if killed:  # else it was too late
        said = zygote.log.read_text().splitlines()[-1]
        assert said == "jacobiflow sample: another process has ended: run the same command again to resume"
        assert (killed, left) == (-signal.SIGKILL, 2)
        assert records(out) >= 5
    assert ends(zygote, zygote.start("sample", flow[1], *flags, "--seed", 2, processes=2)) == [2, 2]
    (line,) = zygote.log.read_text().splitlines()
    assert line.startswith(f"jacobiflow sample: {out} holds a job with other settings (seed 1, now 2)")


# Places that cannot be written to

# Root writes anywhere, until it has lost this capability (CAP_DAC_OVERRIDE, at its next exec).
DROP = "import ctypes, os; ctypes.CDLL(None).prctl(24, 1, 0, 0, 0)"
CLOSED = f"{DROP}; os.execv(sys.executable, [sys.executable, '-m', 'jacobiflow.cli.main', *sys.argv[1:]])"


def complaint(*args: object, before: str) -> str:
    """The one line of an error of the real command, without what it says of its progress."""
    with command("sample", *args, before=before) as process:
        out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, err
    assert out == ""
    *others, last = err.splitlines()
    assert all(" samples in " in line or "cores: " in line for line in others), err
    return last.removeprefix("jacobiflow sample: ")


@pytest.mark.slow
def test_a_full_disk(flow: Any, job: Any, tmp_path: Path) -> None:
    """A limit on the size of files is what a full disk looks like: the write fails."""
    out = tmp_path / "out"
    line = complaint(flow[1], *SMALL, "--out", out, before=limited(2000))
    assert line == f"cannot write into {out}: File too large: fix that and rerun the command to resume"
    assert records(out) == 0
    assert list(out.glob(".partial/*")) == list(out.glob("shards/*")) == []
    assert job(out, *SMALL)[0] == 0
    assert samples(out)["index"].tolist() == list(range(22))


@pytest.mark.slow
def test_a_read_only_folder(flow: Any, job: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o555)
    line = complaint(flow[1], *SMALL, "--out", out, before=CLOSED)
    assert line == f"cannot write into {out}: Permission denied: fix that and rerun the command to resume"
    assert list(out.iterdir()) == []
    status, _, err = job(flow[1] / "config.json" / "out", *SMALL)
    place = f"{flow[1]}/config.json/out"
    line = f"jacobiflow sample: cannot write into {place}: Not a directory: fix that and rerun the command to resume"
    assert (status, err) == (2, line + "\n")
    out.chmod(0o755)
    assert job(out, *SMALL)[0] == 0
    assert samples(out)["index"].tolist() == list(range(22))
