"""`jacobiflow models`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from jacobiflow.cli.options import Json, listing, parse, report, table
from jacobiflow.flows.checkpoint import CheckpointError, bundled_names, load
from jacobiflow.flows.flow import Flow
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
    models: list[dict[str, Any]] = []
    unavailable: dict[str, str] = {}
    for name in bundled_names():
        try:
            flow = load(name)
        except CheckpointError as error:  # its family is not installed
            unavailable[name] = str(error)
            continue
        facts = {"family": flow.family, "parameters": sum(p.numel() for p in flow.parameters())}
        models.append({"name": name, **facts, "backend": usual_backend(flow), "config": asdict(flow.config)})
    recipes = [{"name": name, "about": Recipe.load(name).about} for name in recipe_names()]
    lines = [("model", "family", "parameters", "backend")]
    lines += [(m["name"], m["family"], f"{m['parameters']:,}", m["backend"]) for m in models]
    about = listing((r["name"], r["about"]) for r in recipes)
    shown = table(lines) if models else "no models are bundled with this release"
    notes = "".join(f"\n{name} cannot be loaded: {reason}" for name, reason in unavailable.items())
    text = f"{shown}{notes}\n\nrecipes, for `jacobiflow train`:\n{about}"
    report({"models": models, "unavailable": unavailable, "recipes": recipes}, text, as_json=args.json)


def usual_backend(flow: Flow) -> str:
    """The backend of the flow on this machine if none is asked for."""
    with torch.inference_mode():
        context = torch.zeros(flow.context_features) if flow.context_features else None
        return " + ".join(sorted({block.engine.name for block in flow.bound_blocks(1, context=context)}))
