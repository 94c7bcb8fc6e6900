"""Records as the HTML that the page shows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from jacobiflow.core.types import Method
from jacobiflow_lab.analysis.walk import Walk
from jacobiflow_lab.app.actions import Frame, Sampled, Tuned
from jacobiflow_lab.app.invert import Inverted
from jacobiflow_lab.app.models import Shelf
from jacobiflow_lab.app.pictures import across, curve, deviation_grid, grid, png, span

FEWER = 5  # columns of the few samples whose way is shown


def picture(src: str, title: str, caption: str, name: str) -> str:
    """A picture with its captions; `name` is how tests and scripts find it."""
    return (
        f'<figure class="jf-figure" data-name="{escape(name)}">'
        f"<figcaption><b>{escape(title)}</b></figcaption>"
        f'<img src="{src}" alt="{escape(title)}"><figcaption>{escape(caption)}</figcaption></figure>'
    )


def cards(values: Iterable[tuple[str, str, str]]) -> str:
    """Figures that one should see first: their names, what they are called on the page, their values."""
    items = "".join(
        f'<div class="jf-card" data-name="{escape(name)}"><span>{escape(text)}</span>'
        f"<b>{escape(value)}</b></div>"
        for name, text, value in values
    )
    return f'<div class="jf-cards">{items}</div>'


def bars(rows: Iterable[tuple[str, float, str]], name: str) -> str:
    """Label, share of the full length, and what stands behind the bar."""
    items = "".join(
        f'<span class="jf-label">{escape(label)}</span><span class="jf-track">'
        f'<i style="width:{100 * min(max(share, 0.0), 1.0):.2f}%"></i></span>'
        f'<span class="jf-value">{escape(value)}</span>'
        for label, share, value in rows
    )
    return f'<div class="jf-bars" data-name="{escape(name)}">{items}</div>'


def table(rows: Sequence[Sequence[str]], name: str) -> str:
    """The first row is the head."""
    head = "".join(f"<th>{escape(c)}</th>" for c in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(c)}</td>" for c in row) + "</tr>" for row in rows[1:])
    return (
        f'<div class="jf-scroll"><table class="jf-table" data-name="{escape(name)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def note(text: str) -> str:
    """A line for people."""
    return f'<p class="jf-note">{escape(text)}</p>'


def complaint(text: str) -> str:
    """Why something cannot be done."""
    return f'<p class="jf-complaint" role="alert">{escape(text)}</p>'


def seconds(value: float) -> str:
    """Three digits that matter.

    >>> seconds(0.01234), seconds(12.34)
    ('12.3 ms', '12.3 s')
    """
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def small(value: float) -> str:
    """A deviation; 0 is exactly 0."""
    return "not finite" if not math.isfinite(value) else "0" if value == 0 else f"{value:.2g}"


# Sample


def figures(found: Sampled) -> str:
    """What it took and how far it is from exact."""
    base, row = found.rows
    values = [
        ("sequential-seconds", "sequential", seconds(base.seconds)),
        ("plan-seconds", row.plan if row.plan != "sequential" else "again", seconds(row.seconds)),
        ("speedup", "speed-up", f"{row.speedup:.2f}x"),
        ("largest", "largest deviation", small(row.largest)),
        ("mean", "mean deviation", small(row.mean)),
        ("status", "status", row.summary),
    ]
    return cards(values[:1] + values[3:] if row.plan == "sequential" else values)


def grids(shelf: Shelf, found: Sampled) -> str:
    """Sequential and the plan side by side, and where they differ."""
    flow, (base, row) = shelf[found.model], found.rows
    columns, white = across(len(found.x), found.labels), span(flow, found.exact)
    differ, top = deviation_grid(found.x, found.exact, columns=columns)
    exact = png(grid(found.exact, columns=columns, white=white))
    swept = png(grid(found.x, columns=columns, white=white))
    scale = f"black is 0, the brightest is {small(top)}" if top else "every pixel is the same"
    return (
        '<div class="jf-grid">'
        + picture(exact, "sequential", f"exact, in {seconds(base.seconds)}", "sequential")
        + picture(swept, row.plan, f"in {seconds(row.seconds)}", "plan")
        + picture(png(differ), "where they differ", scale, "deviation")
        + "</div>"
    )


def sweeps(found: Sampled) -> str:
    """Sweeps of each block as bars; the full length is what sequential decoding takes."""
    row, full = found.rows[1], max(found.length - 1, 1)
    rows = [
        (
            f"block {i + 1}" + (" (noise)" if i == 0 else ""),
            count / full,
            f"{count:.1f} of {full} · {seconds(time)} · {method_name(method)}",
        )
        for i, (count, time, method) in enumerate(zip(row.sweeps, found.seconds, found.plan, strict=True))
    ]
    return "<h3>Sweeps of each block</h3>" + bars(rows, "sweeps")


def curves(found: Sampled) -> str:
    """The convergence of each block."""
    last = len(found.convergence)
    titles = {1: "block 1 (next to the noise)", last: f"block {last} (next to the data)"}
    drawn = "".join(
        f"<div>{curve(block, titles.get(i, f'block {i}'))}</div>"
        for i, block in enumerate(found.convergence, 1)
    )
    return (
        "<h3>How each block approaches its exact answer</h3>"
        '<p class="jf-note">distance from exact (l2) after so many steps: '
        '<b class="jf-accent">sweeps over the whole sequence</b>, <b class="jf-quiet">one position a step</b>'
        f'</p><div class="jf-grid jf-curves" data-name="convergence">{drawn}</div>'
    )


def moment(shelf: Shelf, found: Sampled, way: Walk, now: Frame) -> str:
    """Both ways of solving the block, after some steps."""
    white = span(shelf[found.model], found.exact)
    left, right = (png(grid(x, columns=FEWER, white=white)) for x in (now.sequential, now.swept))
    full = way.length - 1
    return (
        '<div class="jf-grid jf-pair">'
        + picture(left, "one position at a time", f"after {now.positions} of {full} steps", "walk-positions")
        + picture(
            right,
            "all positions at once",
            f"after {now.sweeps} of {len(way.swept) - 1} sweeps",
            "walk-sweeps",
        )
        + "</div>"
    )


def method_name(method: Method) -> str:
    """A method in few words."""
    if method.width == 1:
        return "one by one"
    width = "whole" if method.width is None else f"windows of {method.width}"
    return f"{width}, tol {method.tol:g}"


# Invert


def inverted(found: Inverted) -> str:
    """The picture, its noise and what came back."""
    stats = found.decoded.stats
    residual = 0.0 if stats.residual is None else float(stats.residual.max())
    head = cards(
        [
            ("error", "reconstruction error, largest", small(found.largest)),
            ("mean-error", "mean", small(found.mean)),
            ("log-likelihood", "log-likelihood", f"{found.log_prob:,.1f} nats"),
            ("bits", "bits a dimension", f"{found.bits_per_dim:.3f}"),
            ("residual", "largest error of the noise", small(residual)),
            ("seconds", "decoded in", seconds(stats.seconds)),
        ]
    )
    differ, top = deviation_grid(found.back, found.x)
    turned = "dark and light exchanged" if found.negative else "with the noise of training"
    shown = [
        (png(grid(found.x)), "as the model sees it", turned, "input"),
        (png(grid(found.z, white=3.0)), "encoded", "noise: black is -3, white is 3", "latent"),
        (png(grid(found.back)), "decoded again", f"status: {stats.status.name.lower()}", "reconstruction"),
        (png(differ), "error", f"the brightest is {small(top)}", "error-map"),
    ]
    pictures = "".join(picture(*each) for each in shown)
    return head + f'<div class="jf-grid jf-small">{pictures}</div>' + by_label(found)


def by_label(found: Inverted) -> str:
    """What the model takes the picture for."""
    if not found.by_label:
        return ""
    rows = [
        (str(i), share, f"{share:.1%} · {value:,.1f} nats")
        for i, (share, value) in enumerate(zip(found.shares, found.by_label, strict=True))
    ]
    return "<h3>What the model takes it for</h3>" + bars(rows, "labels")


# Plans


def tuned(found: Tuned) -> str:
    """The plan of this machine, or that there is none."""
    setting = found.setting
    what = f"{found.model}, batches of {setting.batch}"
    what += ", with labels" if setting.labels else ""
    what += f", guidance {setting.guidance.weight:g}" if setting.guidance.weight else ""
    where = f"{setting.machine} · {setting.device} · {setting.threads} threads · {setting.dtype}"
    if found.plan is None:
        return note(f"No plan has been made for {what} on this machine yet.") + note(where)
    about = found.plan.about
    m = about["measured"]
    rows: list[tuple[str, ...]] = [
        ("block", "method", "first guess", "seconds", "sequential", "speed-up", "largest deviation")
    ]
    for i, (method, tried) in enumerate(zip(found.plan, about["tried"], strict=True), 1):
        base = next(t for t in tried if t["width"] == 1)
        same = {"width": method.width, "tol": method.tol, "init": method.init}
        trial = next((t for t in tried if all(t[k] == v for k, v in same.items())), base)
        off = trial["deviation"]
        rows.append(
            (
                str(i),
                method_name(method),
                "" if method.width == 1 else method.init,
                seconds(trial["seconds"]),
                seconds(base["seconds"]),
                f"{base['seconds'] / trial['seconds']:.2f}x",
                "not finite" if off is None else small(off),
            )
        )
    head = cards(
        [
            ("plan-seconds", "the plan", seconds(m["seconds"])),
            ("sequential-seconds", "sequential", seconds(m["sequential_seconds"])),
            ("speedup", "speed-up", f"{m['speedup']:.2f}x"),
            ("deviation", "largest deviation", small(m["deviation"])),
            ("allowed", "allowed", f"{setting.max_deviation:g}"),
        ]
    )
    return (
        note(f"{what}; plan auto uses this.")
        + head
        + table(rows, "tuned-plan")
        + note(f"measured on {m['rows']} samples of fresh noise · {where}")
    )
