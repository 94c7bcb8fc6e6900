"""`python -m jacobiflow_lab.baselines` trains a baseline. Rerun the command to resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from jacobiflow.core.results import JacobiflowError
from jacobiflow.data.config import DataConfig
from jacobiflow_lab.baselines.training import train_baseline


@dataclass(frozen=True, kw_only=True)
class Args:
    """Train a baseline of the comparison for as long as the flow. Rerun the command to resume.

    example: python -m jacobiflow_lab.baselines --kind ddim --data cifar10.npz --budget-seconds 3600
    --flip --out cifar10-cpu-ddim
    """

    kind: Literal["ddim", "fastgan"]
    """A diffusion model (needs the extra baselines), or a GAN."""
    data: str
    """An .npz file, a folder of images or a Hugging Face dataset id."""
    budget_seconds: float
    """Seconds of training over all runs: those of the flow."""
    out: Path
    """Folder for the checkpoint and the state of the run."""
    flip: bool = False
    """Mirror images at random."""
    augment: bool = False
    """fastgan: augment what the discriminator sees; for data sets of a few thousand images or fewer."""
    seed: int = 0
    """Seed of the weights, the order of the data and all noise."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, ..."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 2 for errors that the user can fix."""
    args = tyro.cli(Args, args=argv, description=Args.__doc__)
    try:
        found = train_baseline(
            args.kind,
            DataConfig(source=args.data),
            args.budget_seconds,
            args.out,
            options={"flip": args.flip} | ({"augment": True} if args.augment else {}),
            seed=args.seed,
            device=args.device,
            progress=lambda text: print(text, file=sys.stderr, flush=True),
        )
    except (JacobiflowError, OSError, ValueError) as error:
        print(f"baselines: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(found.to_dict(), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
