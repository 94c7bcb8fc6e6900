"""Shell completion: tyro's script for one parser of all commands. It holds all names: Tab imports nothing."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, make_dataclass
from typing import Annotated, Any, Union

import tyro

from jacobiflow.cli.main import COMMANDS, find
from jacobiflow.cli.options import MARKS
from jacobiflow.core.results import JacobiflowError
from jacobiflow.flows.checkpoint import bundled_names
from jacobiflow.flows.plans import PLANS
from jacobiflow.training.recipe import Recipe, recipe_names

MODEL_COMMANDS = ("sample", "tune", "bench", "evaluate", "analyze")  # their first argument is a model


def print_script(shell: str) -> None:
    """Print the script for bash, zsh or fish."""
    commands: dict[str, Any] = {}
    for name in COMMANDS:
        with suppress(JacobiflowError):  # the lab is not installed
            args = find(name).Args
            commands[name] = _recipes(args) if name == "train" else _named(name, args)
    with suppress(SystemExit):  # tyro ends the program after printing
        args = ["--tyro-print-completion", shell]
        tyro.cli(_choice(commands), prog="jacobiflow", args=args, config=[tyro.conf.AvoidSubcommands])


def _choice(kinds: dict[str, Any]) -> Any:
    """Subcommands by name."""
    each = (Annotated[kind, tyro.conf.subcommand(name)] for name, kind in kinds.items())
    return Union[tuple(each)]  # noqa: UP007


def _recipes(args: Any) -> Any:
    """The options of `train`, per recipe: their defaults are the recipe's fields."""
    each = []
    for name in recipe_names():
        recipe = Recipe.load(name)
        default = args(model=recipe.model, data=recipe.data, training=recipe.training)
        each.append(Annotated[args[type(recipe.model)], tyro.conf.subcommand(name, default=default)])
    return Union[tuple(each)]  # noqa: UP007


def _named(command: str, args: Any) -> Any:
    """The options of a command, with plans by name, and bundled models as subcommands: tyro completes no arguments."""

    def extended(kind: Any, *field: Any) -> Any:  # as if the class had been written so: tyro reads its comments
        place = {"__module__": args.__module__}
        return make_dataclass("Args", [field], bases=(kind,), namespace=place, frozen=True, kw_only=True)

    kind: Any = args
    plan: Any = tyro.extras.literal_type_from_choices(PLANS)
    for field in fields(args):
        if field.name == "plan":
            kind = extended(args, "plan", tuple[plan, ...] if field.default == () else plan | None, field.default)
    if command in MODEL_COMMANDS and (models := bundled_names()):
        kind = extended(kind, "known", _choice(dict.fromkeys(models, kind)))
    return Annotated[(kind, *MARKS, tyro.conf.OmitSubcommandPrefixes)]
