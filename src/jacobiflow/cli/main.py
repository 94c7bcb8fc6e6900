"""`jacobiflow COMMAND ...`: finds the command, runs it, turns a user's error into one line."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import entry_points
from io import TextIOWrapper
from typing import Any

from jacobiflow.core.suggest import did_you_mean

LAB = "jacobiflow-lab"  # the distribution of the commands that the library does not have
SHELLS = ("bash", "zsh", "fish")
COMMANDS = {
    "sample": "draw samples: a grid of images, an array, or shards",
    "tune": "find the fastest plan of a flow on this machine, and keep it",
    "bench": "time plans against sequential decoding on this machine",
    "train": "train a flow by a recipe, on one process or many",
    "evaluate": "measure how good a model's samples are",
    "analyze": "masking, convergence, sweeps, run time and memory, layer by layer",
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
    try:
        return importlib.import_module(f"jacobiflow.cli.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"jacobiflow.cli.{name}":
            raise
        from jacobiflow.core.results import JacobiflowError

        raise JacobiflowError(f"this command belongs to {LAB}: pip install {LAB}") from None


def overview() -> str:
    """What `jacobiflow --help` prints."""
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: jacobiflow COMMAND [options]\n\n"
        "Fast sampling of autoregressive normalizing flows.\n\n"
        f"commands:\n{rows}\n\n"
        "example:\n  jacobiflow sample mnist -n 16 --labels 0-9 --out out\n\n"
        "`jacobiflow COMMAND --help` explains a command.\n"
        "`jacobiflow --version` prints the version.\n"
        "`jacobiflow --completion bash` (or zsh, fish) prints a completion script."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 2 for anything that the user can mend.

    It is 1 where a command has done its work, but some of its samples are not finite, or it found problems.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal may lack a letter
    if not args or args[0] in ("-h", "--help"):
        print(overview())
        return 0
    if args[0] == "--version":
        from jacobiflow import __version__

        print(f"jacobiflow {__version__}")
        return 0
    if args[0] == "--completion":
        from jacobiflow.cli.completion import print_script

        if args[1:] not in [[shell] for shell in SHELLS]:
            print(f"jacobiflow --completion takes one of {', '.join(SHELLS)}", file=sys.stderr)
            return 2
        print_script(args[1])
        return 0
    name, *rest = args
    if name not in COMMANDS:
        hint = did_you_mean(name, COMMANDS)
        print(f"jacobiflow: no command {name!r}{hint}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    from jacobiflow.core.hardware import out_of_memory
    from jacobiflow.core.results import JacobiflowError

    try:
        command = find(name)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = command.main(rest) or 0
        sys.stdout.flush()
    except SystemExit as stop:  # --help
        return int(stop.code or 0)
    except BrokenPipeError:  # whoever read our output has stopped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (JacobiflowError, ValueError, TypeError, OSError, MemoryError) as error:
        return _complain(name, error)
    except RuntimeError as error:
        if out_of_memory(error):
            return _complain(name, error)
        raise
    except KeyboardInterrupt:
        print(f"jacobiflow {name}: stopped", file=sys.stderr)
        return 130
    return int(status)


def _complain(name: str, error: Exception) -> int:
    """A user's error as one line; JACOBIFLOW_TRACEBACK=1 shows where it came from."""
    if os.environ.get("JACOBIFLOW_TRACEBACK"):
        raise error
    reason = " ".join(str(error).split()) or type(error).__name__
    print(f"jacobiflow {name}: {reason}", file=sys.stderr)
    return 2


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"jacobiflow: warning: {' '.join(str(message).split())}", file=sys.stderr)


def run() -> None:
    """The process that `jacobiflow` starts. One of several ends without tearing down the interpreter:
    gloo's threads may still let go of a tensor then, and abort a run that has succeeded.
    """
    status = main()
    if "torch.distributed" in sys.modules and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    run()
