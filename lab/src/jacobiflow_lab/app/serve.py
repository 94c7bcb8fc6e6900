"""The server: the page behind its gate, on a port of this machine."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gradio as gr
import torch
import uvicorn
from fastapi import FastAPI

from jacobiflow_lab.app.gate import Gate, host_name
from jacobiflow_lab.app.invert import MAX_FILE_BYTES
from jacobiflow_lab.app.models import ModelRegistry, UserError
from jacobiflow_lab.app.page import build
from jacobiflow_lab.app.visitors import MAX_VISITORS, Visitors

SYSTEM_FONTS = ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")  # of the visitor
CONNECTIONS = 8 * MAX_VISITORS


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    allow_host: Sequence[str] = (),
    device: torch.device | str = "cpu",
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve the playground until it is stopped.

    port: 0 means any free port. allow_host: names that the page answers to besides `host`, localhost and
    the address that a visitor connects to. ready: gets the page's address when the port is open.
    """
    names = [host, *(_checked_name(name) for name in allow_host)]
    folder = TemporaryDirectory(prefix="jacobiflow-app-", ignore_cleanup_errors=True)
    with folder as uploads, _listen(host, port) as listener:
        os.environ |= {"GRADIO_ANALYTICS_ENABLED": "False", "GRADIO_TEMP_DIR": uploads}
        models, visitors = ModelRegistry(model, device), Visitors()

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            shutil.rmtree(uploads, ignore_errors=True)  # here: uvicorn ends the process at SIGTERM

        page = gr.mount_gradio_app(
            FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan),
            build(models, visitors, Path(uploads)),
            path="/",
            server_name=host,
            server_port=listener.getsockname()[1],
            footer_links=[],
            **dict.fromkeys(("run_history", "enable_monitoring", "ssr_mode", "show_error"), False),
            max_file_size=MAX_FILE_BYTES,
            theme=gr.themes.Default(font=SYSTEM_FONTS, font_mono=SYSTEM_FONTS),
            css=files(__package__).joinpath("page.css").read_text(),
        )
        gate = Gate(page, names=names, uploads=Path(uploads), visitors=visitors)
        limits: dict[str, Any] = {"timeout_graceful_shutdown": 1, "limit_concurrency": CONNECTIONS}
        server = uvicorn.Server(uvicorn.Config(gate, log_level="warning", **limits))
        # Browsers keep a connection open. Cutting it at the end is no error.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not server.should_exit)
        ready(f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}")
        server.run(sockets=[listener])


def _checked_name(name: str) -> str:
    checked = host_name(f"[{name}]" if ":" in name else name)
    if not checked:
        raise UserError(f"--allow-host takes a name such as play.example.org, without a port, not {name!r}")
    return checked


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. It is opened before the models are loaded, so that errors come at once."""
    if not 0 <= port <= 65535:
        raise UserError(f"--port must be from 0 to 65535, not {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UserError(f"--host {host}: no such address") from None
    try:
        return socket.create_server(address, family=family)
    except OSError as error:
        reason = f"cannot listen on {host} port {port} ({error.strerror})"
        raise UserError(f"{reason}: choose another --port") from None
