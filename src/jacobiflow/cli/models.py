"""`jacobiflow models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from jacobiflow.cli.options import Json, parse, report
from jacobiflow.core.tables import listing
from jacobiflow.flows.bundled import models
from jacobiflow.training.recipe import Recipe, recipe_names


@dataclass(frozen=True)
class Args:
    """List the bundled models and recipes.

    example: jacobiflow models --json
    """

    json: Json = False


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="models")
    found = models()
    recipes = [{"name": name, "about": Recipe.load(name).about} for name in recipe_names()]
    about = listing((r["name"], r["about"]) for r in recipes)
    text = f"{found!r}\n\nrecipes, for `jacobiflow train`:\n{about}"
    report({"models": [asdict(m) for m in found], "recipes": recipes}, text, as_json=args.json)
