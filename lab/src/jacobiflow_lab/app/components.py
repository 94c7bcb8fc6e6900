"""Parts that the tabs share: pictures, tables, the status line, and how a button runs its work."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from html import escape
from typing import Any

import gradio as gr

from jacobiflow.core.hardware import out_of_memory
from jacobiflow.core.results import JacobiflowError
from jacobiflow_lab.app.visitors import Monitor, Visitors

# Work waits in line. A look at a result does not.
WORK: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "work", "api_visibility": "private"}
LOOK: dict[str, Any] = WORK | {"concurrency_limit": 4, "concurrency_id": "look", "show_progress": "hidden"}
READY = "Ready. This machine does one computation at a time."

Look = dict[str, Any]  # how a component looks: arguments of its constructor and of its updates


def updates(looks: list[Look]) -> list[Any]:
    """What an event returns for looks. Gradio keeps a copy of each update per visitor, but of no value."""
    return [look["value"] if look.keys() == {"value"} else gr.update(**look) for look in looks]


def status_line(name: str) -> gr.Textbox:
    """Shows progress, or why something cannot be done."""
    return gr.Textbox(READY, show_label=False, container=False, interactive=False, lines=1, elem_id=name)


def dim_others(model: gr.Dropdown, results: gr.Column | gr.HTML, first: str | None = None) -> gr.State:
    """Dim results while another model than theirs is chosen. Returns the name of theirs, at first `first`."""
    shown = gr.State(first)

    def dim(chosen: str, shown: str) -> Any:
        return gr.update(elem_classes=["stale"] if chosen != shown else [])

    gr.on([model.input, shown.change], dim, [model, shown], results, **LOOK)
    return shown


def attempt(work: Callable[[], list[Any]], outputs: int) -> list[Any]:
    """The status line and the outputs of some work. Errors that the visitor can correct become messages."""
    try:
        return [READY, *work()]
    except (JacobiflowError, ValueError, TypeError, OSError) as error:
        text = " ".join(str(error).split())
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        text = "this machine has not enough memory: ask for fewer samples"
    gr.Warning(escape(text), duration=6, title="That cannot be done")
    return [text, *[gr.skip()] * outputs]


def run_on(
    event: Callable[..., Any],
    work: Callable[..., list[Any]],
    fields: dict[str, Any],
    status: gr.Textbox,
    outputs: list[Any],
    visitors: Visitors,
) -> None:
    """Run work(monitor, **fields) when the event happens. The work ends when the visitor leaves.

    fields: components by the names of the arguments that they become.
    """

    def run(request: gr.Request, progress: gr.Progress = gr.Progress(), *values: Any) -> list[Any]:  # noqa: B008
        def check() -> None:
            visitors.check(request.session_hash)

        def report(share: float, text: str) -> None:
            check()
            progress(share, desc=text)

        def checked() -> list[Any]:
            check()  # nothing begins for somebody who left the line
            monitor = Monitor(report=report, check=check)
            return work(monitor, **dict(zip(fields, values, strict=True)))

        try:
            return attempt(checked, len(outputs))
        finally:
            with suppress(OSError, AttributeError):  # threads leave memory in pieces; glibc returns it if asked
                ctypes.CDLL(None).malloc_trim(0)

    event(run, list(fields.values()), [status, *outputs], show_progress_on=status, **WORK)
