"""Parts that the tabs share: pictures, tables, the status line, and how a button runs its work."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from html import escape
from typing import Any

import gradio as gr
from gradio.components.plot import PlotData

from jacobiflow.core.hardware import out_of_memory
from jacobiflow.core.results import JacobiflowError
from jacobiflow_lab.app.views import Picture
from jacobiflow_lab.app.visitors import Monitor, Visitors

# Work waits in line. A look at a result does not.
WORK: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "work", "api_visibility": "private"}
LOOK: dict[str, Any] = WORK | {"concurrency_limit": 4, "concurrency_id": "look", "show_progress": "hidden"}
READY = "Ready. This machine does one computation at a time."

Fields = dict[str, Any]  # components by the names of the arguments that they become


def picture(name: str, min_width: int = 220) -> gr.Plot:
    """A picture with its caption.

    gr.Image and gr.Gallery load pictures as files, and the gate lets no files out. gr.Plot gets them as data.
    """
    return gr.Plot(elem_id=name, elem_classes="picture", buttons=[], min_width=min_width)


def shown(picture: Picture) -> Any:
    """The update of a `picture`."""
    image, caption = picture
    file = io.BytesIO()
    image.save(file, "PNG")
    address = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return gr.update(value=PlotData(type="matplotlib", plot=address), label=caption)


def table(name: str, *headers: str) -> gr.DataFrame:
    """A table that cannot be edited."""
    return gr.DataFrame(
        headers=list(headers), interactive=False, show_label=False, buttons=[], wrap=True, elem_id=name
    )


def status_line(name: str) -> gr.Textbox:
    """Shows progress, or why something cannot be done."""
    return gr.Textbox(READY, show_label=False, container=False, interactive=False, lines=2, elem_id=name)


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
    fields: Fields,
    status: gr.Textbox,
    outputs: list[Any],
    visitors: Visitors,
) -> None:
    """Run work(monitor, **fields) when the event happens. The work ends when the visitor leaves."""

    def run(request: gr.Request, progress: gr.Progress = gr.Progress(), *values: Any) -> list[Any]:  # noqa: B008
        def check() -> None:
            visitors.check(request.session_hash)

        def report(share: float, text: str) -> None:
            check()
            progress(share, desc=text)

        monitor = Monitor(report=report, check=check)
        return attempt(lambda: work(monitor, **dict(zip(fields, values, strict=True))), len(outputs))

    event(run, list(fields.values()), [status, *outputs], show_progress_on=status, **WORK)
