"""The page: what stands where, and which button does what."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from jacobiflow.core.hardware import out_of_memory
from jacobiflow.core.types import INITS, JacobiflowError
from jacobiflow.flows.flow import PLANS
from jacobiflow_lab.analysis.walk import Walk
from jacobiflow_lab.app import actions, pad, render
from jacobiflow_lab.app.actions import SWEPT, Sampled
from jacobiflow_lab.app.gate import KEEP_SECONDS, is_upload
from jacobiflow_lab.app.invert import invert
from jacobiflow_lab.app.models import LARGEST_GUIDANCE, RUNS, Refused, Shelf, most
from jacobiflow_lab.app.visitors import VISITORS, WAITING, Visitors

# Those who ask for work wait in line; a look at what is there waits for nobody's turn.
WORK: dict[str, Any] = {"concurrency_limit": 1, "concurrency_id": "work", "api_visibility": "private"}
LOOK: dict[str, Any] = {
    "concurrency_limit": 4,
    "concurrency_id": "look",
    "api_visibility": "private",
    "show_progress": "hidden",
}

RESTING = render.note("All is computed on this machine, one thing after the other.")
SAMPLE = "Press Sample: the same noise is decoded one position at a time, and by the plan."
WALK = (
    "What the flow would make of a block that is not solved yet. With sweeps the picture appears all at "
    "once, one position at a time it appears piece by piece. The second slider follows the "
    "first, step for step; pull it on to see how long that way is."
)
INVERT = (
    "A digit is encoded into noise, and the noise is decoded again. These models write light on dark; an "
    "upload with a light border is turned over."
)
TUNE = (
    "Which way of decoding is fastest depends on the machine and on how many samples are drawn at once. "
    "Tuning measures it, which may take a minute, and keeps what it found for plan auto."
)


def attempt(work: Callable[[], list[Any]], outputs: int) -> list[Any]:
    """What goes into a line for messages and so many outputs; what a visitor can mend is a message."""
    try:
        return [RESTING, *work()]
    except (JacobiflowError, ValueError, TypeError, OSError) as error:
        text = " ".join(str(error).split())
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        text = "this machine has not enough memory: ask for less"
    gr.Warning(escape(text), duration=6, title="That cannot be done")
    return [render.complaint(text), *[gr.skip()] * outputs]


def build(shelf: Shelf, visitors: Visitors, uploads: Path) -> gr.Blocks:
    """The whole page. uploads: the folder that gradio keeps uploads in."""
    page = gr.Blocks(title="jacobiflow", analytics_enabled=False, delete_cache=(KEEP_SECONDS, KEEP_SECONDS))
    with page:
        gr.HTML(
            "<h1>jacobiflow</h1><p>Normalizing flows, sampled by parallel sweeps instead of one position "
            "at a time.</p>",
            elem_classes="jf-head",
        )
        with gr.Tab("Sample"):
            _sample_tab(shelf, visitors)
        with gr.Tab("Invert"):
            _invert_tab(shelf, visitors, uploads)
        with gr.Tab("Plans"):
            _plan_tab(shelf, visitors)
        for name, reason in shelf.left_out.items():
            gr.HTML(render.note(f"{name} is left out: {reason}"))
    page.state_session_capacity = VISITORS
    page.queue(max_size=WAITING, api_open=False)
    page.has_launched = True  # gradio checks the paths of files only then; mounting does not set it
    return page


def _labels(shelf: Shelf, name: str) -> list[str]:
    return [str(i) for i in range(shelf[name].num_classes)]


def _how(shelf: Shelf, name: str, prefix: str = "") -> tuple[gr.Dropdown, gr.Number, gr.Dropdown]:
    """Fields for the plan, its tolerance and its first guess; the last two are for plans that sweep."""
    flow = shelf[name]
    plan = gr.Dropdown(list(PLANS), value="selective", label="Plan", elem_id=f"{prefix}plan")
    with gr.Row():
        tol = gr.Number(
            flow.default_tol, label="Tolerance (tau)", step=0.01, min_width=100, elem_id=f"{prefix}tol"
        )
        init = gr.Dropdown(
            list(INITS), value=flow.default_init, label="First guess", min_width=100, elem_id=f"{prefix}init"
        )

    def fields(plan: str) -> list[Any]:
        return [gr.update(visible=plan in SWEPT)] * 2

    plan.input(fields, plan, [tol, init], **LOOK)
    return plan, tol, init


def _status(name: str) -> gr.HTML:
    """The lines above a button: progress, or why something cannot be done."""
    return gr.HTML(RESTING, elem_id=name, elem_classes="jf-status", min_height=72)


def _watched(visitors: Visitors, request: gr.Request, progress: gr.Progress) -> dict[str, Any]:
    """Progress for a visitor, and a check that ends the work when the visitor has left."""

    def check() -> None:
        visitors.check(request.session_hash)

    def tell(share: float, text: str) -> None:
        check()
        progress(share, desc=text)

    return {"progress": tell, "check": check}


# Sample


def _sample_tab(shelf: Shelf, visitors: Visitors) -> None:
    first = shelf.names[0]
    flow, labels = shelf[first], _labels(shelf, first)
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            model = gr.Dropdown(shelf.names, value=first, label="Model", elem_id="model")
            label = gr.Dropdown(
                labels,
                value=labels[:10],
                multiselect=True,
                label="Labels, in turn",
                visible=bool(labels),
                elem_id="labels",
            )
            with gr.Row():
                count = gr.Number(min(10, most(flow)), label="Count", min_width=100, elem_id="count")
                seed = gr.Number(0, label="Seed", min_width=100, elem_id="seed")
            plan, tol, init = _how(shelf, first)
            guidance = gr.Slider(
                0,
                LARGEST_GUIDANCE,
                value=0,
                step=0.1,
                label="Guidance",
                visible=bool(labels),
                elem_id="guidance",
            )
            runs = gr.Slider(1, RUNS, value=1, step=1, label="Runs (median time)", elem_id="runs")
            status = _status("status")
            go = gr.Button("Sample", variant="primary", elem_id="go")
        with gr.Column(scale=3, min_width=320):
            figures = gr.HTML(render.note(SAMPLE), elem_id="figures")
            grids = gr.HTML(elem_id="grids")
            with gr.Column(visible=False) as more:
                gr.HTML("<h3>Walk through a block</h3>" + render.note(WALK))
                with gr.Row():
                    block = gr.Dropdown([], label="Block", min_width=140, elem_id="block")
                    sweep = gr.Slider(0, 1, value=0, step=1, label="Sweeps", min_width=240, elem_id="sweep")
                    position = gr.Slider(
                        0, 1, value=0, step=1, label="Single positions", min_width=240, elem_id="position"
                    )
                stumble = gr.HTML("", elem_id="stumble", elem_classes="jf-message")
                walked = gr.HTML(elem_id="walk", min_height=200)
            sweeps, curves = gr.HTML(elem_id="sweeps"), gr.HTML(elem_id="curves")
    state, way = gr.State(time_to_live=KEEP_SECONDS), gr.State(time_to_live=KEEP_SECONDS)

    def fit(name: str) -> list[Any]:
        flow, labels = shelf[name], _labels(shelf, name)
        return [
            gr.update(choices=labels, value=labels[:10], visible=bool(labels)),
            gr.update(value=flow.default_tol),
            gr.update(value=flow.default_init),
            gr.update(visible=bool(labels), value=0),
        ]

    def draw(request: gr.Request, progress: gr.Progress = gr.Progress(), *values: Any) -> list[Any]:  # noqa: B008
        names = ("model", "labels", "count", "seed", "plan", "tol", "init", "guidance", "runs")

        def work() -> list[Any]:
            given = dict(zip(names, values, strict=True))
            found = actions.sample(shelf, **given, **_watched(visitors, request, progress))
            progress(0.9, desc="walking through the first block")
            choices = [(_block_name(i, len(found.plan)), i) for i in range(1, len(found.plan) + 1)]
            return [
                found,
                *(render.figures(found), render.grids(shelf, found)),
                *(render.sweeps(found), render.curves(found)),
                gr.update(visible=True),
                gr.update(choices=choices, value=1),
                *begun(found, 1),
            ]

        return attempt(work, 11)

    def begun(found: Sampled | None, block: Any) -> list[Any]:
        walk = actions.begin_walk(shelf, found, block)
        assert found is not None
        now = actions.frame(shelf, found, walk, 0, 0)
        return [
            walk,
            gr.update(maximum=max(len(walk.swept) - 1, 1), value=0),
            gr.update(maximum=max(walk.length - 1, 1), value=0),
            render.moment(shelf, found, walk, now),
        ]

    def begin(found: Sampled | None, block: Any) -> list[Any]:
        return attempt(lambda: begun(found, block), 4)

    def step(found: Sampled | None, walk: Walk | None, sweeps: Any) -> list[Any]:
        """Both go on by the same number of steps."""
        together = min(sweeps, walk.length - 1) if walk and isinstance(sweeps, int | float) else 0
        return [*look(found, walk, sweeps, together), together]

    def look(found: Sampled | None, walk: Walk | None, sweeps: Any, positions: Any) -> list[Any]:
        def work() -> list[Any]:
            if found is None or walk is None:
                raise Refused("these samples have been let go: press Sample again")
            return [render.moment(shelf, found, walk, actions.frame(shelf, found, walk, sweeps, positions))]

        return attempt(work, 1)

    asked = [model, label, count, seed, plan, tol, init, guidance, runs]
    shown = [figures, grids, sweeps, curves, more]
    walking = [way, sweep, position, walked]
    model.input(fit, model, [label, tol, init, guidance], **LOOK)
    go.click(draw, asked, [status, state, *shown, block, *walking], show_progress_on=status, **WORK)
    block.input(begin, [state, block], [stumble, *walking], show_progress_on=walked, **WORK)
    quick: dict[str, Any] = {"trigger_mode": "always_last", **LOOK}
    sweep.input(step, [state, way, sweep], [stumble, walked, position], **quick)
    position.input(look, [state, way, sweep, position], [stumble, walked], **quick)


def _block_name(i: int, last: int) -> str:
    return f"{i}, next to the noise" if i == 1 else f"{i}, next to the data" if i == last else str(i)


# Invert


def _invert_tab(shelf: Shelf, visitors: Visitors, uploads: Path) -> None:
    names = shelf.invertible
    if not names:
        gr.HTML(render.note("None of the models here is one of pictures."))
        return
    labels = _labels(shelf, names[0])
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            with gr.Tab("Draw"):
                canvas = gr.HTML(
                    "", html_template=pad.HTML, css_template=pad.CSS, js_on_load=pad.JS, elem_id="pad"
                )
                draw_status = _status("draw-status")
                from_canvas = gr.Button("Invert the drawing", variant="primary", elem_id="invert-drawing")
            with gr.Tab("Upload"):
                file = gr.File(label="PNG, JPEG or WebP", height=140, elem_id="upload")
                file_status = _status("file-status")
                from_file = gr.Button("Invert the picture", variant="primary", elem_id="invert-upload")
            model = gr.Dropdown(names, value=names[0], label="Model", elem_id="invert-model")
            label = gr.Dropdown(
                _one_of(labels), value="", label="Label", visible=bool(labels), elem_id="invert-label"
            )
            plan, tol, init = _how(shelf, names[0], "invert-")
        with gr.Column(scale=3, min_width=320):
            out = gr.HTML(render.note(INVERT), elem_id="inverted")
    without = [name for name in shelf.names if name not in names]
    if without:
        gr.HTML(
            render.note(f"{', '.join(without)}: a field on a lattice is nothing to draw, so it is not here.")
        )

    def fit(name: str) -> list[Any]:
        flow, labels = shelf[name], _labels(shelf, name)
        return [
            gr.update(choices=_one_of(labels), value="", visible=bool(labels)),
            gr.update(value=flow.default_tol),
            gr.update(value=flow.default_init),
        ]

    def run(source: str, values: tuple[Any, ...], watched: dict[str, Any]) -> list[Any]:
        given = dict(zip((source, "model", "label", "plan", "tol", "init"), values, strict=True))

        def work() -> list[Any]:
            if given.get("upload") and not is_upload(given["upload"], uploads):
                raise Refused("this file was not uploaded here: upload a picture first")
            return [render.inverted(invert(shelf, **given, **watched))]

        return attempt(work, 1)

    def drawing(request: gr.Request, progress: gr.Progress = gr.Progress(), *values: Any) -> list[Any]:  # noqa: B008
        return run("drawing", (values[0] or "", *values[1:]), _watched(visitors, request, progress))

    def picture(request: gr.Request, progress: gr.Progress = gr.Progress(), *values: Any) -> list[Any]:  # noqa: B008
        return run("upload", values, _watched(visitors, request, progress))

    asked = [model, label, plan, tol, init]
    model.input(fit, model, [label, tol, init], **LOOK)
    from_canvas.click(drawing, [canvas, *asked], [draw_status, out], show_progress_on=draw_status, **WORK)
    from_file.click(picture, [file, *asked], [file_status, out], show_progress_on=file_status, **WORK)


def _one_of(labels: list[str]) -> list[tuple[str, str]]:
    return [("none", ""), *((x, x) for x in labels)]


# Plans


def _plan_tab(shelf: Shelf, visitors: Visitors) -> None:
    first = shelf.names[0]
    flow = shelf[first]
    conditional = flow.num_classes > 0
    with gr.Row():
        with gr.Column(scale=1, min_width=280):
            model = gr.Dropdown(shelf.names, value=first, label="Model", elem_id="tuned-model")
            batch = gr.Number(
                min(16, most(flow)),
                label="Samples at once",
                info="plans are made for 1, 2, 4, ... samples; the nearest is used",
                elem_id="tuned-batch",
            )
            labelled = gr.Checkbox(
                conditional, label="with labels", visible=conditional, elem_id="tuned-labels"
            )
            guidance = gr.Slider(
                0, LARGEST_GUIDANCE, value=0, step=0.5, label="Guidance", visible=conditional
            )
            status = _status("tune-status")
            show = gr.Button("Show the plan", elem_id="show-plan")
            make = gr.Button("Tune now", variant="primary", elem_id="tune")
        with gr.Column(scale=3, min_width=320):
            gr.HTML("<h3>The tuned plan of this machine</h3>" + render.note(TUNE))
            out = gr.HTML(elem_id="tuned")

    def fit(name: str) -> list[Any]:
        conditional = shelf[name].num_classes > 0
        return [gr.update(value=conditional, visible=conditional), gr.update(value=0, visible=conditional)]

    def given(values: tuple[Any, ...]) -> dict[str, Any]:
        return dict(zip(("model", "batch", "labelled", "guidance"), values, strict=True))

    def stored(*values: Any) -> list[Any]:
        return attempt(lambda: [render.tuned(actions.stored_plan(shelf, **given(values)))], 1)

    def tuned(request: gr.Request, progress: gr.Progress = gr.Progress(), *values: Any) -> list[Any]:  # noqa: B008
        watched = _watched(visitors, request, progress)
        return attempt(lambda: [render.tuned(actions.make_plan(shelf, **given(values), **watched))], 1)

    asked = [model, batch, labelled, guidance]
    model.input(fit, model, [labelled, guidance], **LOOK)
    show.click(stored, asked, [status, out], show_progress_on=status, **WORK)
    make.click(tuned, asked, [status, out], show_progress_on=status, **WORK)
