"""What every section of `make bench` shares: races, their record in docs/bench, and its tables."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jacobiflow as jf
from jacobiflow.core.hardware import busy_elsewhere, processor_name
from jacobiflow.flows.compare import REST
from jacobiflow.flows.masked_mlp import MaskedMLP

ROOT = Path(__file__).parent.parent
REPEATS = 7
Row = dict[str, Any]
Contestants = Mapping[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Section:
    """One table: `rows(repeats)` measures it."""

    title: str
    rows: Callable[[int], list[Row]]


def race(
    peer: str,
    runs: Contestants,
    exact: Tensor,
    repeats: int,
    floors: Mapping[str, float] | None = None,
    **about: Any,
) -> list[Row]:
    """Rows of all contestants: medians of alternating runs, as ratios to the peer's.

    floors: seconds that a contestant could take at best.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    outs: dict[str, Tensor] = {}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            time.sleep(REST)
            began = time.perf_counter()
            outs[name] = run()
            if turn:  # the first round warms up
                seconds[name].append(time.perf_counter() - began)
    rows = []
    for name in runs:
        # Of the ratios of runs side by side: what disturbs the machine for a while disturbs both.
        ratio = statistics.median(a / b for a, b in zip(seconds[peer], seconds[name], strict=True))
        row = about | {"method": name, "seconds": statistics.median(seconds[name]), "ratio": ratio}
        row["deviation"] = (outs[name] - exact).abs().max().item()
        if floors is not None:
            row["floor"] = floors.get(name)
            row["distance"] = row["seconds"] / row["floor"] if row["floor"] else None
        rows.append(row)
        print("   ", cells(row), flush=True)
    return rows


@cache
def matmul_speed() -> float:
    """Multiplications and additions a second of a large matrix product."""
    a, b = torch.randn(2, 1536, 1536)
    times = []
    for _ in range(7):
        began = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - began)
    return float(2 * len(a) ** 3 / statistics.median(times))


def arithmetic(flow: jf.Flow) -> float:
    """Operations of one forward pass of one sample: products with weights, and attention."""
    total = 0.0
    for block in flow.blocks:
        if isinstance(block, MaskedMLP):
            masks = [block.get_buffer(f"mask{i}") for i in range(len(block.linears))] + [block.head_mask]
            total += 2 * sum(int(mask.sum()) for mask in masks)
        else:
            t, w = flow.latent_shape[0], flow.config.width
            matrices = sum(p.numel() for name, p in block.named_parameters() if p.ndim == 2 and "embed" not in name)
            total += 2 * t * matrices + 2 * t * t * w * flow.config.layers_per_block
    return total


def floor(flow: jf.Flow, n: int) -> float:
    """Seconds of one forward pass's arithmetic at the speed of a large matrix product."""
    return n * arithmetic(flow) / matmul_speed()


def one_sweep(flow: jf.Flow, z: Tensor, **condition: Any) -> float:
    """Seconds of one sweep a block."""
    plan = jf.Plan((jf.Method(max_sweeps=1),) * len(flow.blocks))
    return median(lambda: flow.decode(z, plan, on_failure="return", warn=False, **condition))


def median(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds, after a first run."""
    times = []
    for turn in range(repeats + 1):
        began = time.perf_counter()
        run()
        if turn:
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def record(name: str, section: Section, repeats: int, folder: Path, command: str) -> None:
    """Measure one section and write its JSON."""
    print(f"{name}: {section.title}", flush=True)
    began, others = time.perf_counter(), busy_elsewhere()
    rows = section.rows(repeats)
    seconds = time.perf_counter() - began
    doc = {
        "section": name,
        "title": section.title,
        "command": command,
        **about_machine(),
        "repeats": repeats,
        "took_seconds": round(seconds, 1),
        "busy_elsewhere": round(max(busy_elsewhere() - others, 0) / seconds, 3),  # cores that others kept busy
        "rows": [{k: _short(v) for k, v in row.items()} for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(doc, indent=1) + "\n", encoding="utf-8")


def about_machine() -> Row:
    """What was measured, with what and on what."""
    name = processor_name(torch.device("cpu"))
    return {
        "commit": _commit(),
        "torch": torch.__version__,
        "cpu": f"{name}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}",
        "threads": torch.get_num_threads(),
    }


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _commit() -> str:
    """What was measured; a plus if code had changed since."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "src", "benchmarks")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("+" if changed else "")


# Tables

UNITS = {
    "ratio",
    "distance",
    "auto_ratio",
    "check_per_read",
    "over_the_rung_above",
    "over_the_plain_loop",
    "before",
    "now",
    "bound",
}  # x
HEADS = {
    "ratio": "ratio to the peer",
    "deviation": "largest deviation",
    "distance": "times the floor",
    "auto_ratio": "auto / best fixed",
    "check_per_read": "check / read",
}


def cells(row: Row) -> str:
    """A row of a table."""
    return " | ".join(_cell(key, value) for key, value in row.items())


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in ("seconds", "floor") or key.endswith("_seconds"):
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    if key in UNITS:
        return f"{value:.3g}x" if value < 100 else f"{value:.0f}x"
    if key == "share" or key.endswith("_share"):
        return f"{100 * value:.0f}%"
    if key.endswith("_bytes"):
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.2g}" if isinstance(value, float) else str(value)


def table(doc: Mapping[str, Any]) -> str:
    """A section's JSON as Markdown, with where it comes from below."""
    rows = doc["rows"]
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [
        "| " + " | ".join(HEADS.get(k, k.replace("_", " ")) for k in keys) + " |",
        "|" + "---|" * len(keys),
        *("| " + " | ".join(_cell(k, row.get(k)) for k in keys) + " |" for row in rows),
    ]
    source = (
        f"`{doc['command']}`, {doc['repeats']} repetitions, commit {doc['commit']}, torch {doc['torch']}, "
        f"{doc['cpu']}, {doc['threads']} threads; others kept {doc['busy_elsewhere']:.2f} cores busy."
    )
    return "\n".join(lines) + f"\n\n{source}\n"


def documents(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder; other programs keep theirs beside them."""
    found = {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in sorted(folder.glob("*.json"))}
    return {name: doc for name, doc in found.items() if doc.get("section") == name}


def filled(text: str, docs: Mapping[str, Mapping[str, Any]]) -> str:
    """`text` with what stands between <!-- bench:NAME --> and <!-- end --> made anew from the records."""

    def fill(match: re.Match[str]) -> str:
        name = match[1]
        made = {"summary": summary(docs)} | {known: table(doc) for known, doc in docs.items()}
        found = made.get(name) or _missing(name)
        if name in PLOTS and name in docs:
            found += f"\n![{PLOTS[name]}](bench/{name}.png)\n"
        return f"<!-- bench:{name} -->\n{found}<!-- end -->"

    return re.sub(r"<!-- bench:([\w-]+) -->.*?<!-- end -->", fill, text, flags=re.DOTALL)


PLOTS = {"batch": "time against batch", "length": "time against sequence length"}


def _missing(name: str) -> str:
    return f'Not measured yet: `make bench ARGS="{name}"`.\n'


GOALS = {
    "tarflow": "`mnist`, TarFlow, T 196",
    "maf-1": "`mnist-maf`, MAF, T 784",
    "maf-100": "`mnist-maf`, MAF, T 784",
    "zuko-maf": "zuko MAF, 128 features, 1000 samples",
    "zuko-nsf": "zuko NSF, 128 features, 1000 samples",
}


def summary(docs: Mapping[str, Mapping[str, Any]]) -> str:
    """What was measured of the goals, in one table."""
    heads = ("model", "batch", "decoding", "against", "speed-up", "largest deviation from exact")
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, model in GOALS.items():
        rows = docs.get(name, {"rows": []})["rows"]
        for row in rows:
            if row["method"] == rows[0]["method"]:  # the peer
                continue
            batch = row.get("batch", row.get("samples", ""))
            ratio, off = _cell("ratio", row["ratio"]), _cell("deviation", row["deviation"])
            lines.append(f"| {model} | {batch} | {row['method']} | {rows[0]['method']} | {ratio} | {off} |")
    return "\n".join(lines) + "\n"


def write_tables(folder: Path, pages: list[Path]) -> None:
    """All tables as one Markdown file beside the JSON, the plots, and the tables inside `pages`."""
    docs = documents(folder)
    parts = [f"## {name}: {doc['title']}\n\n{table(doc)}" for name, doc in docs.items()]
    (folder / "README.md").write_text("# Measured by `make bench`\n\n" + "\n".join(parts), encoding="utf-8")
    for page in pages:
        page.write_text(filled(page.read_text(encoding="utf-8"), docs), encoding="utf-8")
    if "batch" in docs:
        plot(docs["batch"]["rows"], "batch", folder / "batch.png")
    if "length" in docs:
        plot(docs["length"]["rows"], "length", folder / "length.png")


def plot(rows: list[Row], x: str, path: Path) -> None:
    """Seconds of each method against x, both logarithmic."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(row["method"] for row in rows):
        points = [(row[x], row["seconds"]) for row in rows if row["method"] == name]
        axes.loglog(*zip(*points, strict=True), marker="o", markersize=4, label=name)
    axes.set_xlabel("samples at once" if x == "batch" else "positions of a sequence")
    axes.set_ylabel("seconds")
    ticks = sorted({row[x] for row in rows})
    axes.set_xticks(ticks, [str(t) for t in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
