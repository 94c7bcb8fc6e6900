"""`jacobiflow models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from jacobiflow.cli.options import listing, parse, report, table
from jacobiflow.core.types import joined
from jacobiflow.flows.checkpoint import bundled_names, load
from jacobiflow.flows.flow import Flow
from jacobiflow.training.recipe import Recipe, recipe_names


@dataclass(frozen=True)
class Args:
    """List the bundled models and recipes.

    example: jacobiflow models --json
    """

    json: bool = False
    """Print JSON instead of a table."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="models")
    models: list[dict[str, Any]] = []
    for name in bundled_names():
        flow = load(name)
        count = sum(p.numel() for p in flow.parameters())
        models.append(
            {
                "name": name,
                "family": flow.family,
                "parameters": count,
                "backend": usual_backend(flow),
                "config": asdict(flow.config),
            }
        )
    recipes = [{"name": name, "about": Recipe.load(name).about} for name in recipe_names()]
    lines = [("model", "family", "parameters", "backend")]
    lines += [(m["name"], m["family"], f"{m['parameters']:,}", m["backend"]) for m in models]
    about = listing((r["name"], r["about"]) for r in recipes)
    shown = table(lines) if models else "no models are bundled with this release"
    text = f"{shown}\n\nrecipes, for `jacobiflow train`:\n{about}"
    report({"models": models, "recipes": recipes}, text, as_json=args.json)


def usual_backend(flow: Flow) -> str:
    """What evaluates the flow on this machine if no backend is asked for."""
    with torch.inference_mode():
        context = torch.zeros(flow.context_features) if flow.context_features else None
        return joined(block.engine.name for block in flow.bound_blocks(1, context=context))
