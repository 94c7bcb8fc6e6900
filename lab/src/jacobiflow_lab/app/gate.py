"""The gate in front of the page: which requests reach gradio, and how large they may be.

Gradio has many routes that the page does not use. Some fetch addresses from the internet, run functions
without the queue, or write and send files. The gate lets only the page's own routes through.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Collection
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as Rejected
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jacobiflow_lab.app.invert import MAX_FILE_BYTES
from jacobiflow_lab.app.visitors import Visitors

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIN_FILE_BYTES = 2**16  # a smaller file counts as this many, which bounds their number
MAX_FORM_BYTES = MAX_FILE_BYTES + 2**16  # a file and its multipart headers
MAX_JSON_BYTES = 2 * 2**20  # a drawing takes at most half of it
MAX_HELD_BYTES = 8 * MAX_FORM_BYTES  # of all requests that are being read
MAX_STORED_BYTES = 100 * MAX_FORM_BYTES  # of all uploads
READ_SECONDS = 60  # for the body of a request
DRAIN_SECONDS = 5  # for the rest of a body that is rejected
KEEP_SECONDS = 3600  # after which uploads and samples are deleted

API = "/gradio_api"
HEARTBEAT, DATA, JOIN, UPLOAD = (f"{API}/{x}" for x in ("heartbeat/", "queue/data", "queue/join", "upload"))
PAGES = {"/", "/config", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json"}
READS = PAGES | {DATA, f"{API}/upload_progress"}
FOLDERS = ("/assets/", "/static/", HEARTBEAT)
WRITES = {JOIN: MAX_JSON_BYTES, UPLOAD: MAX_FORM_BYTES}
SESSION = re.compile(r"[\w-]{1,64}", re.ASCII)
FORM = re.compile(r'multipart/form-data; *boundary="?([\w\'()+,./:=?-]{1,70})"?', re.ASCII)


def host_name(text: str) -> str:
    """The name in a Host header without its port, or "".

    >>> host_name("LocalHost.:7860"), host_name("[::1]:7860"), host_name("a b")
    ('localhost', '::1', '')
    """
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([\w.-]+))(?::\d*)?", text.strip(), re.ASCII)
    return (found[1] or found[2]).lower().removesuffix(".") if found else ""


def is_upload(path: object, folder: Path) -> bool:
    """Whether a path names a regular file in the upload folder, or one that was deleted from it.

    Links are resolved first. Devices, pipes and folders are not uploads.
    """
    try:
        real = Path(str(path)).resolve()
        return real.is_relative_to(folder.resolve()) and (real.is_file() or not real.exists())
    except (OSError, ValueError, RuntimeError):  # invalid names, circular links
        return False


class Gate:
    """Wraps the page. names: hosts that it answers to. uploads: the folder of uploads."""

    def __init__(self, app: ASGIApp, *, names: Collection[str], uploads: Path, visitors: Visitors) -> None:
        self.app = app
        self.names = {*LOOPBACK, *(name.lower() for name in names)}
        self.uploads = uploads
        self.visitors = visitors
        self._held = 0  # bytes of the requests that are being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # the page uses no websockets
            return await send({"type": "websocket.close", "code": 1008})
        request, body = Request(scope, receive), bytearray()
        incoming = request.stream()
        try:
            listener = await self._check(request, incoming, body)
            if request.method == "POST":
                receive = _replay(body, receive)
            with self.visitors.connected(listener) if listener else nullcontext():
                await self.app(scope, receive, send)
        except Rejected as error:
            # A client that is still sending when the connection closes loses the response.
            with suppress(TimeoutError, ClientDisconnect):
                async with asyncio.timeout(DRAIN_SECONDS):
                    _ = [None async for _ in incoming]
            headers = {"x-content-type-options": "nosniff", "connection": "close"}
            await PlainTextResponse(f"{error.detail}\n", error.status_code, headers)(scope, receive, send)
        except ClientDisconnect:
            pass  # nobody reads an answer
        finally:
            self._held -= len(body)

    async def _check(self, request: Request, incoming: AsyncIterator[bytes], body: bytearray) -> str | None:
        """Reject a request or read its body. Returns the session that listens for messages, if any."""
        self._check_host(request.scope)
        path = request.scope["path"]
        if request.method in ("GET", "HEAD") and (path in READS or path.startswith(FOLDERS)):
            if path.startswith(HEARTBEAT):
                return self._admit(path.removeprefix(HEARTBEAT))
            return self._admit(request.query_params.get("session_hash")) if path == DATA else None
        if request.method != "POST" or path not in WRITES:
            raise Rejected(404, "the playground has no such page")
        await self._read(request, incoming, body, WRITES[path])
        if path == UPLOAD:
            _check_form(request, body)
            self._make_room(len(body))
        else:
            self._check_json(body)
        return None

    def _check_json(self, body: bytearray) -> None:
        """Reject documents that name files other than uploads. Gradio reads exactly the checked document."""
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise Rejected(400, "the request is not a JSON object")
        if not all(is_upload(path, self.uploads) for path in _paths(document)):
            raise Rejected(403, "this file was not uploaded here: upload an image first")
        self._admit(document.get("session_hash"))
        checked = json.dumps(document).encode()
        self._held += len(checked) - len(body)
        body[:] = checked

    def _check_host(self, scope: Scope) -> None:
        """Reject foreign names of this machine (DNS rebinding) and requests from pages of other sites."""
        here = str((scope.get("server") or [""])[0]).removeprefix("::ffff:")  # the address connected to
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise Rejected(400, "a request needs one Host header")
        for host in hosts + [urlsplit(origin).netloc for origin in headers.getlist("origin")]:
            name = host_name(host)
            if not name or name not in {*self.names, here}:
                raise Rejected(
                    403,
                    f"the playground does not answer to {name or 'this host'}: "
                    f"if that is its name, start it with --allow-host {name or 'NAME'}",
                )

    def _admit(self, session: object) -> str:
        if not isinstance(session, str) or not SESSION.fullmatch(session):
            raise Rejected(400, "session_hash: give up to 64 letters and digits")
        if not self.visitors.admit(session):
            raise Rejected(503, f"{self.visitors.limit} visitors are here already: try again later")
        return session

    async def _read(self, request: Request, incoming: AsyncIterator[bytes], body: bytearray, limit: int) -> None:
        """Read the whole body within its limit, whatever length the header declares."""
        too_large = Rejected(413, f"the request is too large: {limit // 2**20} MB is the most")
        declared = request.headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > limit:
            raise too_large
        try:
            async with asyncio.timeout(READ_SECONDS):
                async for chunk in incoming:
                    if len(body) + len(chunk) > limit:
                        raise too_large
                    if self._held + len(chunk) > MAX_HELD_BYTES:
                        raise Rejected(503, "too many requests at the moment: try again later")
                    self._held += len(chunk)
                    body += chunk
        except TimeoutError:
            raise Rejected(408, f"the request took more than {READ_SECONDS} seconds: send it again") from None

    def _make_room(self, size: int) -> None:
        """Delete old uploads, including those that gradio lost. Reject an upload that does not fit."""
        oldest = time.time() - KEEP_SECONDS
        for path in self.uploads.rglob("*"):
            with suppress(OSError):  # folders that are not empty, files that are already gone
                found = path.lstat()
                if found.st_mtime < oldest:
                    path.rmdir() if path.is_dir() else path.unlink()
                elif not path.is_dir():
                    size += max(found.st_size, MIN_FILE_BYTES)
        if size > MAX_STORED_BYTES:
            raise Rejected(503, "there is no room for more uploads: try again later")


def _check_form(request: Request, body: bytearray) -> None:
    """Reject a form that is not one complete file: gradio would leave pieces of it in its folder."""
    found = FORM.fullmatch(request.headers.get("content-type", ""))
    line = b"--" + found[1].encode() if found else b""
    if not found or body.count(line) != 2 or not body.rstrip().endswith(line + b"--"):
        raise Rejected(400, "an upload is a form with one file: upload one image")


def _paths(document: Any) -> list[Any]:
    """All values in a document that gradio could read as the path of a file."""
    found, open_ = [], [document]
    while open_:
        value = open_.pop()
        if isinstance(value, dict):
            found += [value["path"]] if "path" in value else []
            open_ += value.values()
        elif isinstance(value, list):
            open_ += value
    return found


def _replay(body: bytearray, receive: Receive) -> Receive:
    """Replays the body that was read, then what follows it."""
    waiting: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
