"""The playground as a process, for tests, and under load: `python tests/playground.py 300 30`.

The load is that many requests of that many users at once, each of a session of its own. Six of ten users draw
samples, one asks for too many, one sends a path and a size that are refused, and two start to tune and leave.
Memory, threads and open files of the server are printed on the way.
"""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import torch
from PIL import Image

import jacobiflow as jf

API = "/gradio_api"
PATIENCE = 30  # seconds, for machines that are busy; less than the tuning below takes


def save_small(folder: Path) -> str:
    """A flow of 4 x 4 pictures."""
    torch.manual_seed(0)
    jf.MAF(jf.MAFConfig(features=16, blocks=2, hidden=(16,))).save(folder / "small")
    return str(folder / "small")


class Site:
    """A served playground."""

    def __init__(self, url: str, model: str, cache: Path, pid: int) -> None:
        self.url, self.model, self.cache, self.pid = url, model, cache, pid
        self.port = int(url.rpartition(":")[2])
        self.client = httpx.Client(base_url=url, timeout=20)
        found = self.client.get("/config").json()
        ids = {x["id"]: x["props"].get("elem_id") for x in found["components"]}
        buttons = {"go", "tune", "invert-upload", "show-plan"}
        self.functions = {
            ids[target]: function["id"]
            for function in found["dependencies"]
            for target, _ in function["targets"]
            if ids.get(target) in buttons
        }

    def join(self, button: str, data: list[Any], session: str = "") -> Any:
        """Press a button."""
        document = {
            "fn_index": self.functions[button],
            "session_hash": session or secrets.token_hex(8),
            "data": data,
        }
        return self.client.post(f"{API}/queue/join", json=document)

    def listen(self, session: str) -> Any:
        return self.client.stream("GET", f"{API}/queue/data", params={"session_hash": session})

    def answer(self, button: str, data: list[Any], patience: float = PATIENCE) -> str:
        """What the message line and the first output show after a button was pressed."""
        session = secrets.token_hex(8)
        joined = self.join(button, data, session)
        assert joined.status_code == 200, joined.text
        deadline = time.monotonic() + patience
        with self.listen(session) as stream:
            for line in stream.iter_lines():
                assert time.monotonic() < deadline, "no answer in time"
                if "process_completed" in line:
                    return json.dumps(json.loads(line.removeprefix("data: "))["output"])
        raise AssertionError("no answer")

    def upload(self, name: str, content: bytes) -> Any:
        return self.client.post(f"{API}/upload", files=[("files", (name, content))])

    def invert(self, path: object) -> list[Any]:
        """The fields of the Invert tab, with a file."""
        return [file(path), self.model, "sequential", 0.1, "zeros", ""]


def file(path: object) -> dict[str, Any]:
    return {"path": path, "meta": {"_type": "gradio.FileData"}}


def picture() -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((8, 8)).save(out, "PNG")
    return out.getvalue()


@contextmanager
def served(cache: Path, model: str, *command: str) -> Iterator[Site]:
    """A process that serves the page and prints its address."""
    settings = {"JACOBIFLOW_CACHE": str(cache), "TMPDIR": str(cache)}
    env = os.environ | settings | {"OMP_NUM_THREADS": "1", "JACOBIFLOW_NATIVE": "0"}
    with subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
            assert found is not None, "the server did not start"
            site = Site(found[0], model, cache, server.pid)
            with closing(site.client):
                yield site
        finally:
            server.terminate()
    assert not list(cache.glob("jacobiflow-app-*"))  # the upload folder


# Load


def kept(pid: int) -> dict[str, int]:
    """Megabytes of memory, threads and open files of a process."""
    status = dict(re.findall(r"(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return {"MB": int(status["VmRSS"]) // 1024, "threads": int(status["Threads"]), "files": files}


def sample_fields(site: Site, seed: int, count: int = 4) -> list[Any]:
    """The fields of the Sample tab."""
    return [site.model, "uniform", 0.1, "zeros", 0, [], count, seed, 1, False]


def visit(site: Site, i: int, patience: float) -> str:
    """One request of one user. Returns what came of it."""
    kind = i % 10
    if kind < 6:
        assert f"4 samples from seed {i}," in site.answer("go", sample_fields(site, i), patience), i
        return "sampled"
    if kind == 6:
        assert "Count: give a whole number" in site.answer("go", sample_fields(site, i, 10**6), patience), i
        return "told why not"
    if kind == 7:
        outside = site.join("invert-upload", site.invert("/etc/passwd"))
        large = site.client.post(f"{API}/queue/join", content=bytes(3 * 2**20))
        assert (outside.status_code, large.status_code) == (403, 413), i
        return "refused"
    session = secrets.token_hex(8)
    assert site.join("tune", ["mnist-small", 0, 64, True], session).status_code == 200, i  # takes a minute
    with site.listen(session):
        return "left"


def load(site: Site, requests: int, users: int) -> Iterator[dict[str, Any]]:
    """Send requests, `users` at a time, and tell two to five times how the server is."""
    patience, found, parts = 20.0 * users, Counter[str](), max(2, min(5, requests // users))
    for part in range(parts):
        order = range(part * requests // parts, (part + 1) * requests // parts)
        with ThreadPoolExecutor(users) as pool:
            began = time.monotonic()
            found.update(pool.map(lambda i: visit(site, i, patience), order))
            seconds = time.monotonic() - began
        yield {"requests": order.stop, **found, "seconds": round(seconds, 1), **kept(site.pid)}


def main(requests: int, users: int) -> None:
    with TemporaryDirectory() as folder:
        cache, model = Path(folder) / "cache", save_small(Path(folder))
        cache.mkdir()
        options = ["--port", "0", "--model", model]
        with served(cache, model, "-m", "jacobiflow.cli.main", "app", *options) as site:
            print("at the start:", kept(site.pid), flush=True)
            for line in load(site, requests, users):
                print(line, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
