"""`jacobiflow app`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from jacobiflow.cli.options import Device, parse, pick_device
from jacobiflow.core.progress import note
from jacobiflow.core.tables import pip_install
from jacobiflow_lab.app.models import UserError


@dataclass(frozen=True)
class Args:
    """Open the playground, a page for the browser.

    The page samples a model sequentially and by a plan, side by side; steps through the sweeps of a block;
    inverts digits that are drawn or uploaded; shows and tunes the plans of this machine. It needs no
    internet. Ctrl-C ends it.

    example: jacobiflow app --model mnist --port 7860
    """

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")] = "mnist"
    """The model shown first: a bundled name, a checkpoint folder or a hub id."""
    port: Annotated[int, tyro.conf.arg(metavar="PORT")] = 7860
    """Port to listen on. 0 means any free port."""
    host: Annotated[str, tyro.conf.arg(metavar="ADDRESS")] = "127.0.0.1"
    """Address to listen on. 0.0.0.0 lets other machines in, by this machine's address or by a name given
    with --allow-host."""
    allow_host: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """A further name that the page answers to; may be repeated. Default: localhost, --host and the address
    that a visitor connects to. Requests for other hosts are rejected."""
    device: Device = "auto"


def main(argv: Sequence[str]) -> None:
    """Run the command."""
    args = parse(Args, argv, command="app")
    try:
        import gradio  # noqa: F401

        from jacobiflow_lab.app.gate import LOOPBACK
        from jacobiflow_lab.app.serve import serve
    except ImportError:
        raise UserError(f"the playground needs gradio: {pip_install('lab[app]')}") from None

    def ready(address: str) -> None:
        if args.host not in LOOPBACK:
            note("anybody who can reach this machine can use the page: it has no password")
        print(f"the playground is at {address} (Ctrl-C ends it)", flush=True)

    serve(
        args.model,
        host=args.host,
        port=args.port,
        allow_host=args.allow_host,
        device=pick_device(args.device),
        ready=ready,
    )
