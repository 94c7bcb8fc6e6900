"""Flows from the hub: the real client against a cache on disk, a small hub on this machine, and failures."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

import jacobiflow as jf
from jacobiflow.flows.checkpoint import CARD, CONFIG, WEIGHTS, CheckpointError
from subjects import maf

FIRST, SECOND = "1" * 40, "2" * 40


def flow_of(seed: int) -> jf.Flow:
    return maf(1.0, seed, features=4, blocks=1, hidden=(6,)).eval()


def same(one: jf.Flow, two: jf.Flow) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))


def refused(repo: str, **options: Any) -> str:
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        jf.load(repo, **options)
    assert time.monotonic() - began < 30  # of a busy machine; it takes a fraction of a second
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's client, which has no connection."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def store(cache: Path, commit: str, flow: jf.Flow, ref: str | None = None) -> Path:
    """Put `flow` into the cache as the hub's client does: files are links to blobs."""
    repo = cache / "models--user--toy"
    snapshot = repo / "snapshots" / commit
    for folder in (repo / "blobs", repo / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    flow.save(cache / "made")
    for file in (cache / "made").iterdir():
        blob = repo / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    (cache / "made").rmdir()
    if ref:
        (repo / "refs" / ref).write_text(commit)
    return snapshot


# The cache


def test_the_cache_is_used_without_a_connection(cache: Path) -> None:
    store(cache, FIRST, flow_of(1), ref="v1")
    store(cache, SECOND, flow_of(2), ref="main")
    for revision, seed, commit in (
        (None, 2, SECOND),
        ("main", 2, SECOND),
        ("v1", 1, FIRST),
        (FIRST, 1, FIRST),
        (SECOND, 2, SECOND),
    ):
        flow = jf.load("user/toy", revision=revision)
        assert same(flow, flow_of(seed))
        assert flow.revision == commit


def test_what_is_not_in_the_cache_is_one_line(cache: Path) -> None:
    text = "there is no folder 'user/toy', and the hub does not give it: "
    assert refused("user/toy") == text + "no connection to the hub, and it is not in the local cache"
    store(cache, FIRST, flow_of(1), ref="main")
    assert "no connection" in refused("user/toy", revision="v2")
    assert "no connection" in refused("user/toy", revision=SECOND)


def test_a_part_of_a_checkpoint_in_the_cache_is_one_line(cache: Path) -> None:
    snapshot = store(cache, FIRST, flow_of(1), ref="main")
    (snapshot / WEIGHTS).unlink()
    assert "has no model.safetensors" in refused("user/toy")


def test_links_that_leave_the_cache_are_not_followed(cache: Path) -> None:
    flow_of(2).save(cache.parent / "elsewhere")
    for name in (CONFIG, WEIGHTS):
        snapshot = store(cache, FIRST, flow_of(1), ref="main")
        for file in snapshot.iterdir():
            if file.name == name:
                file.unlink()
                file.symlink_to(cache.parent / "elsewhere" / name)
        assert refused("user/toy") == f"user/toy: {name} is a link that leaves the hub's cache"
        for file in snapshot.iterdir():
            file.unlink()


def test_a_folder_of_that_name_comes_first(cache: Path) -> None:
    store(cache, FIRST, flow_of(1), ref="main")
    flow_of(2).save("user/toy")
    flow = jf.load("user/toy")
    assert same(flow, flow_of(2))
    assert flow.revision is None


# The client, replaced


def test_the_client_is_asked_for_its_files_of_one_revision(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.append({"repo": repo} | options)
        return str(store(cache, SECOND, flow_of(2)))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    flow = jf.load("user/toy", revision="some-branch")
    assert same(flow, flow_of(2))
    assert flow.revision == SECOND
    (options,) = asked
    assert options["repo"] == "user/toy"
    assert options["revision"] == "some-branch"
    assert set(options["allow_patterns"]) == {CONFIG, WEIGHTS, CARD, "guess.safetensors", "profile.json"}


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("first line\nsecond line"), "the hub does not give it: first line"),
        (ValueError("\n\n  first words \n"), "the hub does not give it: first words"),
        (RuntimeError(), "the hub does not give it: RuntimeError"),
    ],
)
def test_any_failure_of_the_client_is_one_line(error: Exception, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert refused("user/toy").endswith(words)


def test_without_the_client_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert "pip install '.[hub]' in the checkout" in refused("user/toy")
    with pytest.raises(CheckpointError, match="pip install"):
        flow_of(1).push_to_hub("user/toy")


def test_ids_that_no_hub_has(cache: Path) -> None:
    assert "user/to y" in refused("user/to y")
    assert "no model" in refused("a/b/c")


# A hub on this machine


@dataclass
class Hub:
    """Commits of one model, the newest under "main"; `failure` is what it answers instead."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    main: str = ""
    failure: tuple[int, str] | None = None
    asked: list[str] = field(default_factory=list)
    address: str = ""


def answer(hub: Hub, path: str) -> tuple[int, dict[str, str], bytes]:
    hub.asked.append(path)
    path = path.partition("?")[0]
    parts = path.strip("/").split("/")
    if hub.failure:
        return hub.failure[0], {"X-Error-Code": hub.failure[1], "X-Error-Message": "no"}, b"{}"
    if parts[:4] == ["api", "models", "user", "toy"]:
        commit = hub.main if len(parts) < 6 or parts[5] == "main" else parts[5]
        if commit not in hub.commits:
            return 404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "no"}, b"{}"
        found = hub.commits[commit]
        if len(parts) > 4 and parts[4] == "tree":
            doc: Any = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in found.items()
            ]
        else:
            doc = {"id": "user/toy", "sha": commit, "siblings": [{"rfilename": name} for name in found]}
        return 200, {"Content-Type": "application/json"}, json.dumps(doc).encode()
    if parts[:3] == ["user", "toy", "resolve"] and parts[3] in hub.commits:
        data = hub.commits[parts[3]].get("/".join(parts[4:]))
        if data is not None:
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": parts[3]}
            return 200, headers, data
    return 404, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "no"}, b"{}"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, data = answer(made, self.path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        do_HEAD = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", made.address)
    template = made.address + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    huggingface_hub.close_session()
    try:
        yield made
    finally:
        huggingface_hub.close_session()
        server.shutdown()
        thread.join()
        server.server_close()


def publish(hub: Hub, folder: Path, commit: str, flow: jf.Flow, **extra: bytes) -> None:
    flow.save(folder)
    hub.commits[commit] = {f.name: f.read_bytes() for f in folder.iterdir()} | extra
    hub.main = commit


def test_the_newest_commit_is_pinned_first(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, tmp_path / "made", FIRST, flow_of(1), **{"evil.py": b"raise SystemExit"})
    flow = jf.load("user/toy")
    assert same(flow, flow_of(1))
    assert flow.revision == FIRST
    assert not any("evil.py" in path for path in hub.asked)
    files = [path for path in hub.asked if "/resolve/" in path]
    assert {path.split("/")[4] for path in files} == {FIRST}  # not "main", which may move on meanwhile

    publish(hub, tmp_path / "made", SECOND, flow_of(2))
    newest, pinned = jf.load("user/toy"), jf.load("user/toy", revision=FIRST)
    assert same(newest, flow_of(2))
    assert newest.revision == SECOND
    assert same(pinned, flow_of(1))
    assert pinned.revision == FIRST

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    asked = len(hub.asked)
    assert jf.load("user/toy").revision == SECOND
    assert len(hub.asked) == asked


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        ((404, "RepoNotFound"), "no such model, or it is private"),
        ((401, "RepoNotFound"), "no such model, or it is private"),
        ((403, "GatedRepo"), "its owner must grant access first"),
        ((404, "RevisionNotFound"), "it has no such revision"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub: Hub, failure: tuple[int, str], words: str) -> None:
    hub.failure = failure
    assert words in refused("user/toy")


def test_a_hub_that_is_not_there_is_one_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    huggingface_hub.close_session()
    assert "no connection to the hub, and it is not in the local cache" in refused("user/toy")
    huggingface_hub.close_session()


# Uploading


def test_a_flow_is_uploaded_as_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    def create_repo(repo: str, **options: Any) -> None:
        calls.append((repo, options))

    def upload_folder(*, repo_id: str, folder_path: str, commit_message: str) -> str:
        calls.append((repo_id, commit_message))
        Path(folder_path).rename(tmp_path / "uploaded")
        Path(folder_path).mkdir()
        return "https://hub/user/toy/commit/1"

    monkeypatch.setattr(huggingface_hub, "create_repo", create_repo)
    monkeypatch.setattr(huggingface_hub, "upload_folder", upload_folder)
    address = flow_of(1).push_to_hub("user/toy", private=True, message="Better digits")
    assert address == "https://hub/user/toy/commit/1"
    assert calls == [("user/toy", {"private": True, "exist_ok": True}), ("user/toy", "Better digits")]
    assert same(jf.load(tmp_path / "uploaded"), flow_of(1))
    assert 'jacobiflow.load("user/toy")' in (tmp_path / "uploaded" / CARD).read_text()


def test_an_upload_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(huggingface_hub, "create_repo", fail)
    with pytest.raises(CheckpointError) as caught:
        flow_of(1).push_to_hub("user/toy")
    assert str(caught.value) == "cannot upload to 'user/toy': no route"
