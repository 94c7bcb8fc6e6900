"""`jacobiflow COMMAND ...`: finds the command, runs it, turns a user's error into one line."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from io import TextIOWrapper
from typing import Any

from jacobiflow import __version__
from jacobiflow.core.hardware import out_of_memory
from jacobiflow.core.results import JacobiflowError, one_line
from jacobiflow.core.tables import did_you_mean, listing, pip_install

SHELLS = ("bash", "zsh", "fish")
COMMANDS = {
    "sample": "draw samples: a grid of images, an array, or shards",
    "tune": "find the fastest plan of a flow on this machine, and keep it",
    "bench": "time plans against sequential decoding on this machine",
    "train": "train a flow by a recipe, on one process or many",
    "evaluate": "measure how good a model's samples are",
    "analyze": "masking, convergence, sweeps, run time and memory, block by block",
    "reproduce": "measure every table and figure of the paper again",
    "convert": "turn a public TarFlow checkpoint into a jacobiflow folder",
    "app": "open the playground, a page for the browser",
    "models": "list the bundled models and recipes",
    "doctor": "check this installation, and say what to do if something is wrong",
}


def find(name: str) -> Any:
    """The module of a command: the library's own, or one that another distribution registers."""
    for entry in entry_points(group="jacobiflow.commands", name=name):
        return entry.load()
    if find_spec(f"jacobiflow.cli.{name}") is None:
        raise JacobiflowError(f"this command belongs to jacobiflow-lab: {pip_install('lab')}")
    return import_module(f"jacobiflow.cli.{name}")


def overview() -> str:
    """What `jacobiflow --help` prints."""
    return f"""usage: jacobiflow COMMAND [options]

Fast sampling of autoregressive normalizing flows.

commands:
{listing(COMMANDS.items())}

example:
  jacobiflow sample mnist -n 16 --labels 0-9 --out out

`jacobiflow COMMAND --help` explains a command.
`jacobiflow --version` (or -V) prints the version.
`jacobiflow --completion bash` (or zsh, fish) prints a completion script."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; status 2: the user can mend it; 1: it is done, but found problems or samples not finite."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a letter
    try:
        status = _run_command(name, rest) if name in COMMANDS else _about(name, rest)
        print(end="", flush=True)  # whoever reads our output may have stopped
        return status
    except BrokenPipeError:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 1
    except KeyboardInterrupt:
        return _complain(f"jacobiflow {name}: stopped", 130)


def _about(name: str, rest: Sequence[str]) -> int:
    """Print help, the version or a completion script."""
    if name in ("-h", "--help"):
        print(overview())
    elif name in ("-V", "--version"):
        print(f"jacobiflow {__version__}")
    elif name != "--completion":
        hint = did_you_mean(name, COMMANDS)
        return _complain(f"jacobiflow: no command {name!r}{hint}; there are {', '.join(COMMANDS)}")
    elif len(rest) != 1 or rest[0] not in SHELLS:
        return _complain(f"jacobiflow --completion takes one of {', '.join(SHELLS)}")
    else:
        from jacobiflow.cli.completion import print_script

        print_script(rest[0])
    return 0


def _run_command(name: str, args: Sequence[str]) -> int:
    """Run a command; a user's error is one line. JACOBIFLOW_TRACEBACK=1 shows where it came from."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            return int(find(name).main(args) or 0)
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except Exception as error:
        known = isinstance(error, JacobiflowError | ValueError | TypeError | OSError) or out_of_memory(error)
        if not known or isinstance(error, BrokenPipeError) or os.environ.get("JACOBIFLOW_TRACEBACK"):
            raise
        return _complain(f"jacobiflow {name}: {one_line(error)}")


def _complain(text: str, status: int = 2) -> int:
    print(text, file=sys.stderr)
    return status


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"jacobiflow: warning: {' '.join(str(message).split())}", file=sys.stderr)


def run() -> None:
    """The process that `jacobiflow` starts."""
    status = main()
    # One of several leaves no interpreter to tear down: gloo's threads may abort a run that has succeeded.
    if "torch.distributed" in sys.modules and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
