"""What lets a shell complete commands, options, models, recipes and plans.

The script is made once and holds all names: pressing Tab starts no Python.
"""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout, suppress
from typing import Any

from jacobiflow.cli.main import COMMANDS, find
from jacobiflow.flows.checkpoint import bundled_names
from jacobiflow.flows.flow import PLANS
from jacobiflow.training.recipe import recipe_names

SHELLS = ("bash", "zsh", "fish")
MODELLED = ("sample", "tune", "bench", "evaluate", "analyze")  # commands whose first word is a model
VALUES = {"--plan": PLANS, "--init": ("zeros", "noise", "previous"), "--device": ("auto", "cpu", "cuda")}


def script(shell: str) -> str:
    """The script for one of SHELLS."""
    known = {name: options(name) for name in COMMANDS}
    return _fish(known) if shell == "fish" else _bash(known, zsh=shell == "zsh")


def options(command: str) -> list[str]:
    """The options that the command's help names; for `train`, those of all its recipes."""
    calls = [[name, "--help"] for name in recipe_names()] if command == "train" else [["--help"]]
    found: dict[str, None] = {}
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "400"  # no option is broken over lines
    try:
        main: Any = find(command).main
        for call in calls:
            with redirect_stdout(text := io.StringIO()), suppress(SystemExit):
                main(call)
            listed = re.findall(r"^[│ ] +(--?[a-z].*?)(?:  |$)", text.getvalue(), re.MULTILINE)
            found |= dict.fromkeys(o for line in listed for o in re.findall(r"(?<!\S)--?[a-z][-.\w]*", line))
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return list(found)


def words(command: str) -> tuple[str, ...]:
    """What the first word after the command may be."""
    if command == "train":
        return tuple(recipe_names())
    return tuple(bundled_names()) if command in MODELLED else ()


def _bash(known: dict[str, list[str]], *, zsh: bool) -> str:
    cases = "\n".join(
        f"    {name}) opts='{' '.join(found)}'; first='{' '.join(words(name))}' ;;"
        for name, found in known.items()
    )
    values = "\n".join(f"    {option}) first='{' '.join(names)}' ;;" for option, names in VALUES.items())
    start = (
        "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" if zsh else ""
    )
    return f"""{start}_jacobiflow() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} opts='' first=''
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W '{" ".join(known)} --help --version --completion' -- "$word"))
    return
  fi
  case ${{COMP_WORDS[1]}} in
    --completion) first='{" ".join(SHELLS)}' ;;
{cases}
  esac
  if [ "$COMP_CWORD" -gt 2 ]; then first=''; fi
  case $before in
{values}
  esac
  case $word in
    -*) COMPREPLY=($(compgen -W "$opts" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "$first" -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _jacobiflow jacobiflow"""


def _fish(known: dict[str, list[str]]) -> str:
    lines = [f"complete -c jacobiflow -f -n __fish_use_subcommand -a {n} -d '{COMMANDS[n]}'" for n in known]
    lines = [line.replace("model's", r"model\'s") for line in lines]
    for name, found in known.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        if words(name):
            lines.append(f"complete -c jacobiflow {seen} -a '{' '.join(words(name))}'")
        for option in found:
            dash = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = VALUES.get(option)
            lines.append(
                f"complete -c jacobiflow {seen} {dash}" + (f" -ra '{' '.join(values)}'" if values else "")
            )
    return "\n".join(lines)
