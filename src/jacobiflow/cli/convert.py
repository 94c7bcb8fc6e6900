"""`jacobiflow convert`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional

from jacobiflow.adapters.tarflow_checkpoint import import_tarflow
from jacobiflow.cli.options import Count, Force, Json, arg, make_folder, parse, report
from jacobiflow.core.progress import steps
from jacobiflow.flows.checkpoint import CONFIG, WEIGHTS
from jacobiflow.training.train import measure

PROFILE_SECONDS = 120.0


@dataclass(frozen=True)
class Args:
    """Turn a public TarFlow checkpoint (.pth or .safetensors) into a jacobiflow folder.

    Files of torch.save (.pth, .pt) are read with weights_only and need torch 2.10
    or newer.

    example: jacobiflow convert afhq_model_8_768_8_8_0.07.pth afhq256
    """

    checkpoint: Annotated[Positional[Path], arg(metavar="CHECKPOINT")]  # The public checkpoint.
    out: Annotated[Positional[Path], arg(metavar="FOLDER")]  # The folder to write.
    channels: Count = 3  # Colour channels of the images; 1 is grey.
    noise_std: Annotated[float | None, arg(metavar="STD")] = None  # Noise of training. Default: as the file name says.
    profile: Literal["quick", "full", "none"] = "quick"
    """How sweeps converge, which plan auto uses: measured within about two minutes, in full, or not."""
    force: Force = False
    json: Json = False


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="convert")
    flow = import_tarflow(args.checkpoint, image_channels=args.channels, noise_std=args.noise_std)
    make_folder(args.out, (CONFIG, WEIGHTS), force=args.force)
    left_out = "no convergence profile"
    if args.profile != "none":
        with steps("measuring") as show_step:
            left_out = measure(flow, math.inf if args.profile == "full" else PROFILE_SECONDS, show_step)
    flow.save(args.out)
    c, count = flow.config, sum(p.numel() for p in flow.parameters())
    text = (
        f"{args.out}: {count:,} parameters, {c.blocks} blocks of {c.layers_per_block} layers, "
        f"{c.image_size}x{c.image_size}x{c.image_channels}, noise {c.noise_std:g}\n"
        + (f"not measured: {left_out}; `jacobiflow tune {args.out} --save` does\n" if left_out else "")
        + f"try: jacobiflow sample {args.out} -n 4 --out samples"
    )
    doc = {"out": str(args.out), "parameters": count, "config": asdict(c), "left_out": left_out}
    report(doc, text, as_json=args.json)
