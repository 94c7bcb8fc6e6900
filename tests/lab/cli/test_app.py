"""`jacobiflow app` before the page is there; tests/app has the page."""

from __future__ import annotations

import socket
import subprocess
import sys
from typing import Any

import pytest


def test_missing_gradio_is_one_line(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert (
        run("app").complaint == "jacobiflow app: the playground needs gradio: pip install './lab[app]' in the checkout"
    )


def test_a_port_that_is_taken_is_one_line(run: Any) -> None:
    pytest.importorskip("gradio")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}" in run("app", "--port", port).complaint


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--port", 70000), "--port must be from 0 to 65535, not 70000"),
        (("--host", "no.such.host.invalid"), "--host no.such.host.invalid: no such address"),
        (("--port", 0, "--model", "nowhere"), "no model 'nowhere'"),
        (("--device", "toaster"), "--device must be"),
        (("--allow-host", "a.example", "--allow-host", "b.example:80"), "without a port, not 'b.example:80'"),
        (("--allow-host", "http://a.example"), "--allow-host takes a name such as play.example.org"),
        (("--allow-host", ""), "--allow-host takes a name such as play.example.org"),
    ],
)
def test_mistakes_are_one_line(run: Any, args: tuple[object, ...], words: str) -> None:
    assert words in run("app", *args).complaint


def test_the_package_does_not_import_gradio() -> None:
    code = "import sys, jacobiflow, jacobiflow_lab.cli.app; sys.exit('gradio' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
