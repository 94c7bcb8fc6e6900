"""`jacobiflow convert`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from jacobiflow.adapters.tarflow_checkpoint import import_tarflow
from jacobiflow.cli.options import parse, report


@dataclass(frozen=True)
class Args:
    """Turn a public TarFlow checkpoint (.pth or .safetensors) into a jacobiflow folder.

    Files of torch.save (.pth, .pt) are read with weights_only and need torch 2.10 or newer.

    example: jacobiflow convert afhq_model_8_768_8_8_0.07.pth afhq256
    """

    checkpoint: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CHECKPOINT")]
    """The public checkpoint."""
    out: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")]
    """The folder to write."""
    channels: int = 3
    """Colour channels of the images; 1 is grey."""
    noise_std: Annotated[float | None, tyro.conf.arg(metavar="STD")] = None
    """Noise of training; left out, it is read off a public file name."""
    json: bool = False
    """Print JSON instead of text."""


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="convert")
    flow = import_tarflow(args.checkpoint, image_channels=args.channels, noise_std=args.noise_std)
    flow.save(args.out)
    c, count = flow.config, sum(p.numel() for p in flow.parameters())
    text = (
        f"{args.out}: {count:,} parameters, {c.blocks} blocks of {c.layers_per_block} layers, "
        f"{c.image_size}x{c.image_size}x{c.image_channels}, noise {c.noise_std:g}\n"
        f"try: jacobiflow sample {args.out} -n 4 --out samples"
    )
    report({"out": str(args.out), "parameters": count, "config": asdict(c)}, text, as_json=args.json)
