"""The page: what stands where, and which button does what."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr

from jacobiflow.flows.flow import Flow
from jacobiflow.flows.plans import PLANS
from jacobiflow_lab.analysis.trajectory import Walk
from jacobiflow_lab.app import actions, views
from jacobiflow_lab.app.actions import SampleResult
from jacobiflow_lab.app.components import LOOK, Fields, attempt, picture, run_on, shown, status_line, table
from jacobiflow_lab.app.gate import KEEP_SECONDS, is_upload
from jacobiflow_lab.app.invert import invert
from jacobiflow_lab.app.models import SWEEP_PLANS, ModelRegistry, UserError, max_samples
from jacobiflow_lab.app.visitors import MAX_VISITORS, MAX_WAITING, Monitor, Visitors

HEAD = "## jacobiflow\nSample normalizing flows by parallel sweeps instead of one position at a time."
SAMPLE = "**Sample** decodes the same noise twice: one position at a time, and by the plan."
STEP = """### Step through a block
The pictures show the samples if the block stopped here. A sweep changes all positions at once; sequential
decoding adds one position per step. The second slider follows the first. Move it to see the other steps."""
INVERT = """**Invert** encodes a digit into noise and decodes the noise again. The models know light ink on a
dark ground, so an upload with a light border is inverted."""
TUNE = """**Tune** measures which plan is fastest on this machine for a batch size, and stores it. This
may take a minute. Plans are made for 1, 2, 4, ... samples; plan auto uses the nearest one."""

State = tuple[SampleResult, Walk]
Resets = list[tuple[Any, Callable[[Flow], Any]]]  # components, and their updates when the model changes


def build(models: ModelRegistry, visitors: Visitors, uploads: Path) -> gr.Blocks:
    """The whole page. uploads: the folder that gradio keeps uploads in."""
    page = gr.Blocks(title="jacobiflow", analytics_enabled=False, delete_cache=(KEEP_SECONDS, KEEP_SECONDS))
    with page:
        gr.Markdown(HEAD)
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                settings, resets = _settings(models)
                for name, reason in models.left_out.items():
                    gr.Textbox(f"{name}: {reason}", label="Not offered", interactive=False)
            with gr.Column(scale=4, min_width=320):
                with gr.Tab("Sample"):
                    resets += _sample_tab(models, visitors, settings)
                with gr.Tab("Invert"):
                    resets += _invert_tab(models, visitors, settings, uploads)
                with gr.Tab("Plans"):
                    resets += _plan_tab(models, visitors, settings)

        def reset(name: str) -> list[Any]:
            return [update(models[name]) for _, update in resets]

        settings["model"].input(reset, settings["model"], [component for component, _ in resets], **LOOK)
    page.state_session_capacity = MAX_VISITORS
    page.queue(max_size=MAX_WAITING, api_open=False)
    page.has_launched = True  # gradio checks the paths of files only then; mounting does not set it
    return page


def _settings(models: ModelRegistry) -> tuple[Fields, Resets]:
    """The fields that all tabs share."""
    flow = models[models.names[0]]
    with gr.Group():
        model = gr.Dropdown(models.names, label="Model", elem_id="model")
        plan = gr.Dropdown(list(PLANS), value="selective", label="Plan", elem_id="plan")
        tol = gr.Number(flow.default_tol, label="Tolerance", step=0.01, elem_id="tol")
        init = gr.Dropdown(list(flow.inits), value=flow.inits[0], label="First guess", elem_id="init")
        guidance = gr.Number(
            **_has_labels(flow) | {"value": 0}, label="Guidance", step=0.1, elem_id="guidance"
        )

    def show(plan: str) -> list[Any]:
        return [gr.update(visible=plan in SWEEP_PLANS)] * 2

    plan.input(show, plan, [tol, init], **LOOK)
    resets: Resets = [
        (tol, lambda flow: flow.default_tol),
        (init, lambda flow: gr.update(choices=list(flow.inits), value=flow.inits[0])),
        (guidance, lambda flow: gr.update(**_has_labels(flow) | {"value": 0})),
    ]
    return {"model": model, "plan": plan, "tol": tol, "init": init, "guidance": guidance}, resets


def _labels(flow: Flow) -> dict[str, Any]:
    """A field for several labels."""
    names = [str(i) for i in range(flow.num_classes)]
    return {"choices": names, "value": names[:10], "visible": bool(names)}


def _label(flow: Flow) -> dict[str, Any]:
    """A field for one label or none."""
    names = _labels(flow)["choices"]
    return {"choices": [("none", ""), *zip(names, names, strict=True)], "value": "", "visible": bool(names)}


def _has_labels(flow: Flow) -> dict[str, Any]:
    """A field that only conditional models have."""
    return {"value": flow.num_classes > 0, "visible": flow.num_classes > 0}


def _hide(flow: Flow) -> Any:
    """Results of one model are not shown beside the settings of another."""
    return gr.update(visible=False)


def _sample_tab(models: ModelRegistry, visitors: Visitors, settings: Fields) -> Resets:
    flow = models[models.names[0]]
    gr.Markdown(SAMPLE)
    with gr.Row():
        labels = gr.Dropdown(
            **_labels(flow), multiselect=True, label="Labels", elem_id="labels", scale=3, min_width=240
        )
        count = gr.Number(min(10, max_samples(flow)), label="Count", min_width=80, elem_id="count")
        seed = gr.Number(0, label="Seed", min_width=80, elem_id="seed")
        runs = gr.Number(1, label="Timed runs", min_width=80, elem_id="runs")
    go = gr.Button("Sample", variant="primary", elem_id="go")
    status = status_line("status")
    with gr.Column(visible=False) as results:
        title = gr.Markdown(elem_id="title")
        headers = ("plan", "time", "speed-up", "largest deviation", "mean deviation", "status")
        summary = table("summary", *headers)
        with gr.Row():
            pictures = [picture(name) for name in ("sequential", "planned", "difference")]
        stepping = _step_panel(models, visitors, status)
        gr.Markdown("### Sweeps per block")
        blocks = table("blocks", "block", "method", "sweeps", "time")
        curves = picture("convergence")

    def draw(monitor: Monitor, **values: Any) -> list[Any]:
        result = actions.sample(models, **values, monitor=monitor)
        numbers = range(1, len(result.plan) + 1)
        return [
            gr.update(visible=True),
            views.sample_title(result),
            views.sample_table(result),
            *map(shown, views.sample_pictures(models[result.model], result)),
            views.block_table(result),
            shown(views.convergence_picture(result)),
            gr.update(choices=[(views.block_name(i, len(numbers)), i) for i in numbers], value=1),
            *_first_step(models, result, 1),
        ]

    fields = {**settings, "labels": labels, "count": count, "seed": seed, "runs": runs}
    outputs = [results, title, summary, *pictures, blocks, curves, *stepping]
    run_on(go.click, draw, fields, status, outputs, visitors)

    return [(labels, lambda flow: gr.update(**_labels(flow))), (results, _hide)]


def _step_panel(models: ModelRegistry, visitors: Visitors, status: gr.Textbox) -> list[Any]:
    """Adds the panel. Returns what a new result changes: the block, then what `_first_step` gives."""
    gr.Markdown(STEP)
    with gr.Row():
        block = gr.Dropdown([], label="Block", min_width=140, elem_id="block")
        sweeps = gr.Slider(0, 1, value=0, step=1, label="Sweeps", min_width=220, elem_id="sweeps")
        positions = gr.Slider(0, 1, value=0, step=1, label="Positions", min_width=220, elem_id="positions")
    with gr.Row():
        pictures = [picture("after-sweeps"), picture("after-positions")]
    state = gr.State(time_to_live=KEEP_SECONDS)  # the result and the steps of its block

    def begin(_: Monitor, state: State | None, block: Any) -> list[Any]:
        return _first_step(models, state and state[0], block)

    def look(state: State | None, sweeps: Any, positions: Any) -> list[Any]:
        return attempt(lambda: _pictures_after(models, state, sweeps, positions), 2)

    def follow(state: State | None, sweeps: Any) -> list[Any]:
        positions = min(sweeps, state[1].length - 1) if state and isinstance(sweeps, int | float) else 0
        return [*look(state, sweeps, positions), positions]

    outputs = [state, sweeps, positions, *pictures]
    run_on(block.input, begin, {"state": state, "block": block}, status, outputs, visitors)
    quick: dict[str, Any] = {"trigger_mode": "always_last", **LOOK}
    sweeps.input(follow, [state, sweeps], [status, *pictures, positions], **quick)
    positions.input(look, [state, sweeps, positions], [status, *pictures], **quick)
    return [block, *outputs]


def _first_step(models: ModelRegistry, result: SampleResult | None, block: object) -> list[Any]:
    if result is None:
        raise UserError("these samples have been deleted: press Sample again")
    steps = actions.block_steps(models, result, block)
    return [
        (result, steps),
        gr.update(maximum=max(len(steps.swept) - 1, 1), value=0),
        gr.update(maximum=max(steps.length - 1, 1), value=0),
        *_pictures_after(models, (result, steps), 0, 0),
    ]


def _pictures_after(models: ModelRegistry, state: State | None, sweeps: Any, positions: Any) -> list[Any]:
    if state is None:
        raise UserError("these samples have been deleted: press Sample again")
    after = actions.samples_after(models, *state, sweeps, positions)
    return list(map(shown, views.step_pictures(models[state[0].model], *state, after, sweeps, positions)))


def _invert_tab(models: ModelRegistry, visitors: Visitors, settings: Fields, uploads: Path) -> Resets:
    gr.Markdown(INVERT)
    with gr.Row():
        with gr.Column(min_width=300):
            with gr.Tab("Draw"):
                pad, script = (
                    files(__package__).joinpath(f"pad.{kind}").read_text() for kind in ("html", "js")
                )
                canvas = gr.HTML("", html_template=pad, js_on_load=script, elem_id="pad")
                from_canvas = gr.Button("Invert the drawing", variant="primary", elem_id="invert-drawing")
            with gr.Tab("Upload"):
                file = gr.File(label="PNG, JPEG or WebP", height=140, elem_id="upload")
                from_file = gr.Button("Invert the image", variant="primary", elem_id="invert-upload")
            label = gr.Dropdown(**_label(models[models.names[0]]), label="Label", elem_id="invert-label")
            status = status_line("invert-status")
        with gr.Column(scale=2, min_width=320, visible=False) as results:
            with gr.Row():
                pictures = [picture(name, 120) for name in ("image", "noise", "reconstruction", "error")]
            with gr.Row():
                facts = table("inverted", "quantity", "value")
                scores = gr.Label(
                    label="Inferred label", show_heading=False, num_top_classes=20, elem_id="scores"
                )

    def run(monitor: Monitor, **values: Any) -> list[Any]:
        if values.get("upload") and not is_upload(values["upload"], uploads):
            raise UserError("this file was not uploaded here: upload an image first")
        if "drawing" in values:
            values["drawing"] = values["drawing"] or ""  # an empty canvas
        result = invert(models, **values, monitor=monitor)
        return [
            gr.update(visible=True),
            *map(shown, views.inversion_pictures(result)),
            views.inversion_table(result),
            gr.update(value=views.label_scores(result), visible=bool(result.by_label)),
        ]

    fields = {name: settings[name] for name in ("model", "plan", "tol", "init")} | {"label": label}
    outputs = [results, *pictures, facts, scores]
    run_on(from_canvas.click, run, {"drawing": canvas, **fields}, status, outputs, visitors)
    run_on(from_file.click, run, {"upload": file, **fields}, status, outputs, visitors)

    return [(label, lambda flow: gr.update(**_label(flow))), (results, _hide)]


def _plan_tab(models: ModelRegistry, visitors: Visitors, settings: Fields) -> Resets:
    flow = models[models.names[0]]
    gr.Markdown(TUNE)
    with gr.Row():
        batch = gr.Number(min(16, max_samples(flow)), label="Batch size", elem_id="tuned-batch")
        labelled = gr.Checkbox(**_has_labels(flow), label="With labels")
    with gr.Row():
        show = gr.Button("Show the plan", elem_id="show-plan")
        make = gr.Button("Tune", variant="primary", elem_id="tune")
    status = status_line("tune-status")
    with gr.Column(visible=False) as results:
        text = gr.Markdown(elem_id="tuned")
        headers = ("block", "method", "first guess", "time", "sequential", "speed-up", "largest deviation")
        blocks = table("tuned-plan", *headers)

    def plan(measure: bool, monitor: Monitor, **values: Any) -> list[Any]:
        result = actions.machine_plan(models, **values, measure=measure, monitor=monitor)
        rows = views.plan_table(result)
        return [gr.update(visible=True), views.plan_text(result), gr.update(value=rows, visible=bool(rows))]

    fields = {name: settings[name] for name in ("model", "guidance")} | {"batch": batch, "labelled": labelled}
    for button, measure in ((show, False), (make, True)):
        run_on(button.click, partial(plan, measure), fields, status, [results, text, blocks], visitors)
    return [(labelled, lambda flow: gr.update(**_has_labels(flow))), (results, _hide)]
