"""Starts the command again and again without importing torch each time: every run is a fork of one process.

That process reads one JSON object a line: {"argv", "env", "cwd", "err"} starts a run and answers its
process id, {"wait": pid} answers how it ended, its processor seconds and the most bytes that it held.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple


class End(NamedTuple):
    """What a run left behind; status as subprocess has it."""

    status: int
    seconds: float
    memory: int


class Zygote:
    """The process that forks, and where its runs write what they say."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        with self.process:  # closes its input, and that ends it
            pass

    def _ask(self, **order: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def start(self, *args: object, processes: int = 1, cwd: Path | str = ".") -> list[int]:
        """Runs `jacobiflow ARGS` in the folder `cwd`; the ids of its processes."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        order = {"argv": list(map(str, args)), "cwd": str(cwd), "err": str(self.log)}
        env = {"WORLD_SIZE": str(processes), **meeting}
        self.log.write_text("")
        return [self._ask(**order, env=env | {"RANK": str(rank)}) for rank in range(processes)]

    def wait(self, pids: list[int]) -> list[End]:
        """How these processes have ended, when they have."""
        return [End(*self._ask(wait=pid)) for pid in pids]


def serve() -> None:
    import torch.distributed

    import jacobiflow.cli.sample
    import jacobiflow.jobs.runner  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        answer: Any
        if "wait" in order:
            _, status, usage = os.wait4(order["wait"], 0)
            seconds, memory = usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss
            answer = [os.waitstatus_to_exitcode(status), seconds, memory]
        else:
            answer = os.fork()
            if answer == 0:
                run(**order)
        print(json.dumps(answer), flush=True)


def run(argv: list[str], env: dict[str, str], cwd: str, err: str) -> None:
    """One run, in the process that was forked for it."""
    from jacobiflow.cli import main

    os.environ.update(env)
    os.chdir(cwd)
    target = os.open(err, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(target, stream)
    sys.argv = ["jacobiflow", *argv]
    status = 70
    try:
        main.run()
    except SystemExit as stop:
        status = int(stop.code or 0)
    finally:  # whatever happens, a run never becomes a second zygote
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
