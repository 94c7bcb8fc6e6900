"""The playground over HTTP: files, hosts and sizes that it refuses, and visitors who leave."""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import pytest

from jacobiflow_lab.app import gate, visitors
from playground import API, Site, file, load, picture, save_small, served

pytest.importorskip("gradio")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    cache, model = tmp_path_factory.mktemp("cache"), save_small(tmp_path_factory.mktemp("model"))
    options = ["--port", "0", "--model", model, "--allow-host", "play.example.org"]
    with served(cache, model, "-m", "jacobiflow.cli.main", "app", *options) as found:
        yield found


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.txt"
    path.write_text("the secret")
    return path


@pytest.fixture(scope="module")
def uploaded(site: Site) -> Path:
    """A picture in the upload folder."""
    return Path(site.upload("a.png", picture()).json()[0])


# Files


def hostile_paths(uploaded: Path, secret: Path) -> dict[str, object]:
    folder = uploaded.parent.parent
    os.mkfifo(secret.parent / "pipe")
    (uploaded.parent / "link").unlink(missing_ok=True)
    (uploaded.parent / "link").symlink_to(secret)
    return {
        "secret": str(secret),
        "relative": os.path.relpath(secret),
        "traversal": f"{uploaded.parent}/../../../../../../../../../{secret}",
        "link": str(uploaded.parent / "link"),
        "folder": str(folder),
        "sibling": f"{folder}-other/a.png",
        "device": "/dev/zero",
        "pipe": str(secret.parent / "pipe"),
        "address": "http://127.0.0.1:9/a.png",
        "public address": "https://example.com/a.png",
        "nul": "a\0b",
        "number": 7,
    }


def test_only_uploads_are_taken_for_files(site: Site, uploaded: Path, secret: Path) -> None:
    for name, path in hostile_paths(uploaded, secret).items():
        for data in (
            site.invert(path),
            [*site.invert(None)[:-1], file(path)],  # in another field
            [{"a": [file(path)]}, *site.invert(None)[1:]],
        ):
            joined = site.join("invert-upload", data)
            assert (joined.status_code, joined.text) == (
                403,
                "this file was not uploaded here: upload an image first\n",
            ), name
    assert not list(site.cache.rglob("secret*"))
    assert "log-likelihood" in site.answer("invert-upload", site.invert(str(uploaded)))
    gone = site.answer("invert-upload", site.invert(str(uploaded.parent / "gone.png")))
    assert "upload it again" in gone


UNGATED = """
import sys
from jacobiflow_lab.app import serve
serve.Gate = lambda page, **_: page
serve.serve(sys.argv[1], port=0, ready=lambda address: print(address, flush=True))
"""


def test_gradio_checks_paths_itself(tmp_path: Path, secret: Path) -> None:
    """Behind the gate is a second lock: without the gate, a file outside the upload folder is not copied."""
    cache, model = tmp_path / "cache", save_small(tmp_path)
    cache.mkdir()
    with served(cache, model, "-c", UNGATED, model) as site:
        answer = site.answer("invert-upload", site.invert(str(secret)))
        assert "was not uploaded here" not in answer  # did not reach the page's own check, the third one
        assert not list(cache.rglob("secret*"))


@pytest.mark.parametrize(
    "path",
    [
        "/run/predict",
        "/api/predict",
        "/call/predict",
        "/call/v2/predict",
        "/stream/event",
        "/component_server",
        "/process_recording",
        "/cancel",
        "/queue/join/",
        "/vibe-code",
    ],
)
def test_routes_that_the_page_does_not_use_are_closed_for_writing(site: Site, path: str) -> None:
    assert site.client.post(API + path, json={"data": []}).text == "the playground has no such page\n"


def test_routes_that_the_page_does_not_use_are_closed_for_reading(site: Site, uploaded: Path) -> None:
    for path in (
        f"file={uploaded}",
        f"file/{uploaded}",
        "file=https://example.com",
        "proxy=https://a.hf.space",
    ):
        assert site.client.get(f"{API}/{path}").status_code == 404
    for path in (
        "/static/../../../../etc/passwd",
        "/static/%2e%2e/%2e%2e/__init__.py",
        "/assets/%2fetc/passwd",
    ):
        head = raw(site, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert re.match(rb"HTTP/1.1 (4\d\d)", head)
        assert b"root:" not in head


# Hosts


def raw(site: Site, request: bytes) -> bytes:
    """The answer to bytes, as far as the server sends it."""
    with closing(socket.create_connection(("127.0.0.1", site.port), timeout=20)) as line:
        found = b""
        with suppress(OSError):  # the server closes the connection when it has seen enough
            line.sendall(request)
        with suppress(OSError):
            while chunk := line.recv(65536):
                found += chunk
        return found


@pytest.mark.parametrize("path", ["/", "/config", f"{API}/queue/data?session_hash=a", f"{API}/heartbeat/a"])
def test_a_foreign_host_is_rejected(site: Site, path: str) -> None:
    with site.client.stream("GET", path, headers={"Host": "evil.example:80"}) as answer:
        assert answer.status_code == 403
        answer.read()
    assert answer.text == (
        "the playground does not answer to evil.example: if that is its name, "
        "start it with --allow-host evil.example\n"
    )


def test_hosts_that_are_answered(site: Site) -> None:
    port = site.port
    for host in (
        "127.0.0.1",
        f"127.0.0.1:{port}",
        "LOCALHOST",
        "localhost.:1",
        "[::1]:80",
        "play.example.org",
    ):
        assert site.client.get("/theme.css", headers={"Host": host}).status_code == 200, host
    for host in ("", "127.0.0.1.evil.example", "localhost@evil.example", "0.0.0.0", "<b>", "a b"):
        assert site.client.get("/theme.css", headers={"Host": host}).status_code in (400, 403), host
    for origin, status in ((site.url, 200), ("http://evil.example", 403), ("null", 403)):
        assert site.client.get("/theme.css", headers={"Origin": origin}).status_code == status, origin
    upgrade = b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13"
    head = raw(site, b"GET /theme.css HTTP/1.1\r\nHost: evil.example\r\n" + upgrade + b"\r\n\r\n")
    assert re.match(rb"HTTP/1.1 40[03]", head)
    head = raw(site, b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
    assert re.match(rb"HTTP/1.1 400", head)


def scope(host: str, server: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": "/",
        "headers": [(b"host", host.encode())],
        "server": (server, 80),
    }


def test_the_address_that_was_connected_to_is_answered() -> None:
    """So that 0.0.0.0 and :: need no list of this machine's addresses."""
    found = gate.Gate(None, names=["0.0.0.0"], uploads=Path(), visitors=visitors.Visitors())  # type: ignore[arg-type]
    found._check_host(scope("192.0.2.7:7860", "192.0.2.7"))
    found._check_host(scope("192.0.2.7:7860", "::ffff:192.0.2.7"))
    found._check_host(scope("0.0.0.0:7860", "127.0.0.1"))
    found._check_host(scope("[2001:db8::7]:7860", "2001:db8::7"))
    for host in ("192.0.2.8", "my-machine"):
        with pytest.raises(gate.Rejected, match=f"--allow-host {host}"):
            found._check_host(scope(host, "192.0.2.7"))


# Sizes


def test_large_uploads_are_rejected(site: Site) -> None:
    large = bytes(gate.MAX_FILE_BYTES)
    assert site.upload("fits.bin", large[:-1000]).status_code == 200
    before = {path for path in site.cache.rglob("*") if path.is_file()}
    answer = site.upload("large.bin", large + large)
    assert (answer.status_code, answer.text) == (413, "the request is too large: 10 MB is the most\n")
    many = [("files", (f"{i}.bin", large[: 2**20])) for i in range(11)]
    assert site.client.post(f"{API}/upload", files=many).status_code == 413
    assert "upload one image" in site.client.post(f"{API}/upload", files=many[:2]).text

    # no Content-Length
    form = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.bin"\r\n\r\n'
    head = f"POST {API}/upload HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    chunk = b"10000\r\n" + bytes(2**16) + b"\r\n"
    chunks = b"%x\r\n%s\r\n" % (len(form), form) + chunk * 170 + b"0\r\n\r\n"
    assert b"HTTP/1.1 413" in raw(site, head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    # one that lies
    lie = raw(site, head.encode() + b"Content-Length: 99\r\n\r\n" + form + bytes(2**20))
    assert re.match(rb"HTTP/1.1 4\d\d", lie)
    assert re.match(rb"HTTP/1.1 4\d\d", raw(site, head.encode() + b"Content-Length: -1\r\n\r\n" + form))
    assert site.client.post(f"{API}/queue/join", content=large).status_code == 413
    assert {path for path in site.cache.rglob("*") if path.is_file()} == before


def test_uploads_that_end_early_leave_nothing(site: Site) -> None:
    before = {path for path in site.cache.rglob("*") if path.is_file()}
    head = f"POST {API}/upload HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    with closing(socket.create_connection(("127.0.0.1", site.port))) as line:
        line.sendall(head.encode() + b"Content-Length: 9000\r\n\r\n--x\r\nContent-Disposition: form-data; ")
        line.sendall(b'name="files"; filename="a.bin"\r\n\r\n' + bytes(5000))
    time.sleep(0.3)
    assert {path for path in site.cache.rglob("*") if path.is_file()} == before


def test_all_uploads_together_are_bounded(tmp_path: Path) -> None:
    found = gate.Gate(None, names=[], uploads=tmp_path, visitors=visitors.Visitors())  # type: ignore[arg-type]
    for i in range(99):
        (tmp_path / str(i)).mkdir()
        with (tmp_path / str(i) / "a.bin").open("wb") as out:
            out.truncate(gate.MAX_FORM_BYTES)
    found._make_room(gate.MAX_FORM_BYTES)
    with pytest.raises(gate.Rejected, match="no room for more uploads"):
        found._make_room(gate.MAX_FORM_BYTES + 1)
    old = time.time() - gate.KEEP_SECONDS - 1
    os.utime(tmp_path / "7" / "a.bin", (old, old))
    found._make_room(gate.MAX_FORM_BYTES + 1)
    assert len(list(tmp_path.rglob("*.bin"))) == 98
    for i in range(gate.MAX_FORM_BYTES // gate.MIN_FILE_BYTES + 1):
        (tmp_path / f"{i}.small").touch()
    with pytest.raises(gate.Rejected, match="no room for more uploads"):
        found._make_room(gate.MAX_FORM_BYTES)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"[" * 10**5, b"9" * 5000, b'{"data": []}', b"\xff"])
def test_documents_that_cannot_be_read_are_one_line(site: Site, body: bytes) -> None:
    answer = site.client.post(f"{API}/queue/join", content=body)
    assert (answer.status_code, answer.text.count("\n")) == (400, 1)


# Visitors


TUNE = ["mnist-small", 0, 64, True]  # takes a minute
QUICK = ["mnist-small", "selective", 0.1, "zeros", 0, [], 0, 0, 1, False]  # no samples: answered at once


def begin_tuning(site: Site, stack: ExitStack) -> None:
    """Somebody tunes a plan and waits for it, until the stack is closed."""
    session = secrets.token_hex(8)
    assert site.join("tune", TUNE, session).status_code == 200
    lines = stack.enter_context(site.listen(session)).iter_lines()
    stack.callback(lines.close)  # without a reference the connection would be closed
    assert any("measuring plans" in line for line in lines)


def test_a_visitor_who_leaves_frees_the_place(site: Site) -> None:
    with ExitStack() as stack:
        begin_tuning(site, stack)
        found: list[str] = []
        next_one = threading.Thread(target=lambda: found.append(site.answer("go", QUICK)), daemon=True)
        next_one.start()
        time.sleep(0.5)
        assert not found  # waits in line
    began = time.monotonic()
    next_one.join(timeout=30)
    assert time.monotonic() - began < 15
    assert "Count: give a whole number" in found[0]
    assert "Plan auto uses this plan" in site.answer("show-plan", TUNE)


def test_a_request_that_nobody_waits_for_is_given_up(site: Site) -> None:
    assert site.join("tune", TUNE).status_code == 200
    began = time.monotonic()
    assert "Count: give a whole number" in site.answer("go", QUICK)
    assert time.monotonic() - began < visitors.CONNECT_SECONDS + 15


def test_the_queue_is_bounded(site: Site) -> None:
    session = secrets.token_hex(8)
    with ExitStack() as stack:
        begin_tuning(site, stack)
        answers = [site.join("go", QUICK, session) for _ in range(visitors.MAX_WAITING + 1)]
    assert [x.status_code for x in answers] == [200] * visitors.MAX_WAITING + [503]
    assert "Queue is full" in answers[-1].text
    with site.listen(session) as stream:
        done = sum("process_completed" in line for line in stream.iter_lines())
    assert done == visitors.MAX_WAITING


def test_the_number_of_visitors_is_bounded(site: Site) -> None:
    with ExitStack() as stack:
        statuses = []
        for i in range(visitors.MAX_VISITORS + 1):
            line = stack.enter_context(closing(socket.create_connection(("127.0.0.1", site.port), timeout=20)))
            line.sendall(f"GET {API}/heartbeat/visitor{i} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            statuses.append(line.recv(12))
        assert statuses[-1] == b"HTTP/1.1 503"
        assert statuses.count(b"HTTP/1.1 200") >= visitors.MAX_VISITORS - 5  # those of other tests may linger
        refused = site.join("go", QUICK)
        assert (refused.status_code, refused.text) == (
            503,
            "50 visitors are here already: try again later\n",
        )
        assert site.join("go", QUICK, "visitor0").status_code == 200
    deadline = time.monotonic() + 10
    while site.join("go", QUICK).status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_thirty_users_at_once(site: Site) -> None:
    """`python tests/playground.py 300 30` is the same ten times as long."""
    first, last = load(site, requests=60, users=30)
    assert {name: last[name] for name in ("sampled", "told why not", "refused", "left")} == {
        "sampled": 36,
        "told why not": 6,
        "refused": 6,
        "left": 12,
    }
    assert last["threads"] <= 60  # gradio's pool has 40, which come and go
    assert last["MB"] <= first["MB"] + 60
    assert last["files"] <= first["files"] + 20
    began = time.monotonic()  # those who left keep nobody waiting
    assert "Count: give a whole number" in site.answer("go", QUICK)
    assert time.monotonic() - began < visitors.CONNECT_SECONDS + 15
