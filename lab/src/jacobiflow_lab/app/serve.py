"""The page on a port of this machine."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from jacobiflow_lab.app.gate import Gate, host_name
from jacobiflow_lab.app.invert import LARGEST_FILE
from jacobiflow_lab.app.models import Refused, Shelf
from jacobiflow_lab.app.visitors import VISITORS, Visitors

CONNECTIONS = 8 * VISITORS


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    allow_host: Sequence[str] = (),
    device: torch.device | str = "cpu",
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the playground until it is stopped; `ready` gets the address when the door is open.

    port 0 is any free one. allow_host: names that it answers to besides `host`, the address that a
    visitor connected to and those of loopback. The page asks nothing of other machines.
    """
    names = [host, *(_allowed(name) for name in allow_host)]
    folder = TemporaryDirectory(prefix="jacobiflow-app-", ignore_cleanup_errors=True)
    with folder as uploads, _door(host, port) as door:
        server = _server(model, device, door, host, names, Path(uploads))
        # Browsers keep a connection open; that it is cut in the end is no error.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)
        ready(f"http://{f'[{host}]' if ':' in host else host}:{door.getsockname()[1]}")
        server.run(sockets=[door])


def _server(
    model: str, device: torch.device | str, door: socket.socket, host: str, names: list[str], uploads: Path
) -> Any:
    """The page behind its gate. uploads: a folder that nobody but this user can write."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    try:
        import gradio as gr
        import uvicorn
        from fastapi import FastAPI
    except ImportError:
        raise Refused("the playground needs gradio: pip install 'jacobiflow-lab[app]'") from None
    from jacobiflow_lab.app.page import build
    from jacobiflow_lab.app.style import CSS, theme

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        shutil.rmtree(uploads, ignore_errors=True)  # here: uvicorn ends the process at SIGTERM

    visitors = Visitors()
    page = gr.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan),
        build(Shelf(model, device), visitors, uploads),
        path="/",
        server_name=host,
        server_port=door.getsockname()[1],
        footer_links=[],
        run_history=False,
        enable_monitoring=False,
        ssr_mode=False,
        show_error=False,
        max_file_size=LARGEST_FILE,
        theme=theme(),
        css=CSS,
    )
    gate = Gate(page, names=names, uploads=uploads, visitors=visitors)
    config = uvicorn.Config(
        gate, log_level="warning", timeout_graceful_shutdown=1, limit_concurrency=CONNECTIONS
    )
    return uvicorn.Server(config)


def _allowed(name: str) -> str:
    found = host_name(f"[{name}]" if ":" in name else name)
    if not found:
        raise Refused(f"--allow-host takes a name such as play.example.org, without a port, not {name!r}")
    return found


def _door(host: str, port: int) -> socket.socket:
    """A socket that listens, before anything slow is done."""
    if not 0 <= port <= 65535:
        raise Refused(f"--port must be from 0 to 65535, not {port}")
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        door = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise Refused(f"--host {host}: no such address") from None
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(where)
        door.listen()
    except OSError as error:
        door.close()
        raise Refused(
            f"cannot listen on {host} port {port} ({error.strerror}): choose another --port"
        ) from None
    return door
