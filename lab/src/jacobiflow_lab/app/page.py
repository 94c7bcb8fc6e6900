"""The page: what stands where, and which button does what. texts.toml has what it says."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import gradio as gr

from jacobiflow.flows.compare import MOST_RUNS
from jacobiflow.flows.plans import PLANS, SWEPT
from jacobiflow_lab.analysis.trajectory import Walk
from jacobiflow_lab.app import actions, views
from jacobiflow_lab.app import components as parts
from jacobiflow_lab.app.actions import SampleResult
from jacobiflow_lab.app.components import LOOK, Look, status_line
from jacobiflow_lab.app.gate import KEEP_SECONDS, is_upload
from jacobiflow_lab.app.invert import invert
from jacobiflow_lab.app.models import TEXTS, ModelRegistry, UserError, max_samples
from jacobiflow_lab.app.visitors import MAX_VISITORS, MAX_WAITING, Monitor, Visitors

State = tuple[SampleResult, Walk]  # samples, and the steps of one block


def build(models: ModelRegistry, visitors: Visitors, uploads: Path) -> gr.Blocks:
    """The whole page. uploads: the folder that gradio keeps uploads in."""
    page = gr.Blocks(title="jacobiflow", analytics_enabled=False, delete_cache=(KEEP_SECONDS, KEEP_SECONDS))
    with page:
        Tabs(models, visitors, uploads).build()
    page.state_session_capacity = MAX_VISITORS
    page.queue(max_size=MAX_WAITING, api_open=False)
    page.has_launched = True  # gradio checks the paths of files only then; mounting does not set it
    return page


class Tabs:
    """The settings and the tabs. Work comes from `actions` and `invert`, what it looks like from `views`."""

    def __init__(self, models: ModelRegistry, visitors: Visitors, uploads: Path) -> None:
        self.models = models
        self.uploads = uploads
        self.run_on = partial(parts.run_on, visitors=visitors)
        self.first = models.names[0]
        self.most = max_samples(models[self.first])
        self.fields: dict[str, Any] = {}  # components by their ids

    def build(self) -> None:
        """Add everything to the page that is open."""
        gr.Markdown(TEXTS["head"])
        with gr.Row():
            with gr.Column(scale=1, min_width=280):
                self.settings()
            with gr.Column(scale=4, min_width=320):
                for name, tab in (("Sample", self.sample), ("Invert", self.invert), ("Plans", self.plans)):
                    with gr.Tab(name):
                        tab()
        own = [self.fields[name] for name in self.looks(self.first)]

        def reset(name: str) -> list[Any]:
            return parts.updates([*self.looks(name).values()])

        self.fields["model"].input(reset, self.fields["model"], own, **LOOK)

    def looks(self, name: str) -> dict[str, Look]:
        """How the fields that depend on the model look for this one."""
        flow, labels = self.models[name], self.models.label_names(name)
        classes = [(label, str(i)) for i, label in enumerate(labels)]
        return {
            "tol": {"value": flow.default_tol},
            "init": {"choices": list(flow.inits), "value": flow.inits[0]},
            "guidance": {"value": 0, "visible": bool(labels)},
            "denoise": {"value": False, "visible": flow.noise_std > 0},
            "labels": {"choices": classes, "value": [i for _, i in classes[:10]], "visible": bool(labels)},
            "invert-label": {"choices": [("none", ""), *classes], "value": "", "visible": bool(labels)},
            "labelled": {"value": bool(labels), "visible": bool(labels)},
        }

    def field(self, kind: Callable[..., Any], name: str, **look: Any) -> Any:
        """Add a field with its label and its help."""
        label, info = TEXTS["fields"][name]
        look |= self.looks(self.first).get(name, {})
        self.fields[name] = kind(label=label, info=info, elem_id=name, **look)
        return self.fields[name]

    def some(self, *names: str, **other: Any) -> dict[str, Any]:
        """Fields by the names of the arguments that they become."""
        return {name: self.fields[name] for name in names} | other

    def settings(self) -> None:
        """The fields that all tabs share."""
        with gr.Group():
            self.field(gr.Dropdown, "model", choices=self.models.names, value=self.first)
            plan = self.field(gr.Dropdown, "plan", choices=list(PLANS), value="auto")
        with gr.Accordion("More settings", open=False, elem_id="more"):
            swept = [self.field(gr.Number, "tol", step=0.01, visible=False)]
            swept.append(self.field(gr.Dropdown, "init", visible=False))
            self.field(gr.Number, "guidance", step=0.1)
            self.field(gr.Checkbox, "denoise")
            self.field(gr.Number, "runs", value=MOST_RUNS)
            for name, reason in self.models.left_out.items():
                gr.Textbox(f"{name}: {reason}", label="Not offered", interactive=False)

        def show(plan: str) -> list[Any]:
            return [gr.update(visible=plan in SWEPT)] * 2

        plan.input(show, plan, swept, **LOOK)

    def sample(self) -> None:
        """The same noise by the plain loop, sequentially and by the plan. It opens with a first result."""
        with gr.Row(equal_height=True):
            self.field(gr.Dropdown, "labels", multiselect=True, scale=3, min_width=300)
            self.field(gr.Number, "count", value=min(10, self.most), min_width=80)
            self.field(gr.Number, "seed", value=0, min_width=80)
        go = gr.Button("Sample", variant="primary", elem_id="go")
        status = status_line("status")
        names = ("model", "plan", "tol", "init", "guidance", "labels", "count", "seed", "runs", "denoise")
        fields = self.some(*names)

        def draw(monitor: Monitor, **values: Any) -> State:
            result = actions.sample(self.models, **values, monitor=monitor)
            return result, actions.block_steps(self.models, result, 1)

        start = draw(Monitor(), **{name: field.value for name, field in fields.items()})
        with gr.Column() as results:
            first, *looks, last = self.sample_looks(start)
            samples = gr.HTML(**first)
            state, *changed = self.stepping(status, start, looks)
            blocks = gr.HTML(**last)

        def show(monitor: Monitor, **values: Any) -> list[Any]:
            found = draw(monitor, **values)
            return [found[0].model, found, *parts.updates(self.sample_looks(found))]

        of = parts.dim_others(self.fields["model"], results, self.first)
        self.run_on(go.click, show, fields, status, [of, state, samples, *changed, blocks])

    def sample_looks(self, state: State) -> list[Look]:
        """Results from the top of the page to its end."""
        result, count = state[0], len(state[0].plan)
        return [
            {"value": views.sample_html(self.models[result.model], result)},
            {"choices": [(views.block_name(i, count), i) for i in range(1, count + 1)], "value": 1},
            *self.step_looks(state),
            {"value": views.block_html(result)},
        ]

    def stepping(self, status: gr.Textbox, start: State, looks: list[Look]) -> list[Any]:
        """Add the panel. Returns what a new result changes: state and block, then what a block changes."""
        gr.Markdown(TEXTS["step"])
        with gr.Row(equal_height=True):
            slider: Look = {"minimum": 0, "step": 1, "min_width": 220}
            block = self.field(gr.Dropdown, "block", min_width=140, **looks[0])
            sweeps = self.field(gr.Slider, "sweeps", **slider, **looks[1])
            positions = self.field(gr.Slider, "positions", **slider, **looks[2])
        pictures = gr.HTML(**looks[3])
        state = gr.State(start, time_to_live=KEEP_SECONDS)

        def begin(_: Monitor, state: State | None, block: Any) -> list[Any]:
            result, _old = _kept(state)
            found = result, actions.block_steps(self.models, result, block)
            return [found, *parts.updates(self.step_looks(found))]

        def go_to(state: State | None, sweeps: Any, positions: Any) -> list[Any]:
            return parts.attempt(lambda: [self.step_html(_kept(state), sweeps, positions)], 1)

        def follow(state: State | None, sweeps: Any) -> list[Any]:
            positions = min(sweeps, state[1].length - 1) if state and isinstance(sweeps, int | float) else 0
            return [*go_to(state, sweeps, positions), positions]

        changed = [sweeps, positions, pictures]
        self.run_on(block.input, begin, {"state": state, "block": block}, status, [state, *changed])
        quick: dict[str, Any] = {"trigger_mode": "always_last", **LOOK}
        sweeps.input(follow, [state, sweeps], [status, pictures, positions], **quick)
        positions.input(go_to, [state, sweeps, positions], [status, pictures], **quick)
        return [state, block, *changed]

    def step_looks(self, state: State) -> list[Look]:
        """The sliders and pictures before the first step of a block."""
        ends = (len(state[1].swept) - 1, state[1].length - 1)
        return [
            *({"maximum": max(end, 1), "value": 0} for end in ends),
            {"value": self.step_html(state, 0, 0)},
        ]

    def step_html(self, state: State, sweeps: Any, positions: Any) -> str:
        """The pictures after some steps of a block."""
        after = actions.samples_after(self.models, *state, sweeps, positions)
        return views.step_html(self.models[state[0].model], *state, after, sweeps, positions)

    def invert(self) -> None:
        """A digit that is drawn or uploaded, encoded and decoded again."""
        gr.Markdown(TEXTS["invert"])
        with gr.Row():
            with gr.Column(min_width=300):
                with gr.Tab("Draw"):
                    folder = files(__package__)
                    pad, script = (folder.joinpath(f"pad.{kind}").read_text() for kind in ("html", "js"))
                    canvas = gr.HTML("", html_template=pad, js_on_load=script, elem_id="pad")
                    from_canvas = gr.Button("Invert the drawing", variant="primary", elem_id="invert-drawing")
                with gr.Tab("Upload"):
                    file = gr.File(label="PNG, JPEG or WebP", height=140, elem_id="upload")
                    from_file = gr.Button("Invert the image", variant="primary", elem_id="invert-upload")
                label = self.field(gr.Dropdown, "invert-label")
                status = status_line("invert-status")
            with gr.Column(scale=2, min_width=320):
                results = gr.HTML()

        def show(monitor: Monitor, **values: Any) -> list[Any]:
            if values.get("upload") and not is_upload(values["upload"], self.uploads):
                raise UserError("this file was not uploaded here: upload an image first")
            if "drawing" in values:
                values["drawing"] = values["drawing"] or ""  # an empty canvas
            result = invert(self.models, **values, monitor=monitor)
            return [result.model, views.inversion_html(result, self.models.label_names(result.model))]

        of = parts.dim_others(self.fields["model"], results)
        fields = self.some("model", "plan", "tol", "init", label=label)
        for button, source in ((from_canvas, {"drawing": canvas}), (from_file, {"upload": file})):
            self.run_on(button.click, show, {**source, **fields}, status, [of, results])

    def plans(self) -> None:
        """The plan that "auto" uses on this machine, and one that is tuned."""
        gr.Markdown(TEXTS["tune"])
        with gr.Row(equal_height=True):
            batch = self.field(gr.Number, "tuned-batch", value=min(16, self.most))
            labelled = self.field(gr.Checkbox, "labelled")
        with gr.Row():
            look_up = gr.Button("Show the plan", elem_id="show-plan")
            make = gr.Button("Tune", variant="primary", elem_id="tune")
        status = status_line("tune-status")
        results = gr.HTML()

        def show(measure: bool, monitor: Monitor, **values: Any) -> list[Any]:
            result = actions.machine_plan(self.models, **values, measure=measure, monitor=monitor)
            return [result.model, views.plan_html(result)]

        of = parts.dim_others(self.fields["model"], results)
        fields = self.some("model", "guidance", batch=batch, labelled=labelled)
        for button, measure in ((look_up, False), (make, True)):
            self.run_on(button.click, partial(show, measure), fields, status, [of, results])


def _kept(state: State | None) -> State:
    if state is None:
        raise UserError("these samples have been deleted: press Sample again")
    return state
