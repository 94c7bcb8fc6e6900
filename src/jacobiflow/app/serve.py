"""The page on a port of this machine."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable

import torch

from jacobiflow.app.models import Refused, Shelf

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    device: torch.device | str = "cpu",
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the playground until it is stopped; `ready` gets the address when the door is open.

    port 0 is any free one. Nothing is asked of other machines, neither here nor by the page.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio as gr
        import uvicorn
        from fastapi import FastAPI
    except ImportError:
        raise Refused("the playground needs gradio: pip install 'jacobiflow[app]'") from None
    from jacobiflow.app.invert import LARGEST_FILE
    from jacobiflow.app.page import build
    from jacobiflow.app.style import CSS, theme

    door = _door(host, port)
    with door:
        shelf = Shelf(model, device)
        address = f"http://{f'[{host}]' if ':' in host else host}:{door.getsockname()[1]}"
        app = gr.mount_gradio_app(
            FastAPI(docs_url=None, redoc_url=None, openapi_url=None),
            build(shelf),
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
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        # Browsers keep a connection open; that it is cut in the end is no error.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)
        ready(address)
        server.run(sockets=[door])


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
