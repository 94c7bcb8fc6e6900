"""What `benchmarks.accelerate` measured, as Markdown."""

from __future__ import annotations

from typing import Any

from benchmarks.accelerate_real import cells


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], order: list[str]) -> list[dict[str, Any]]:
    """Rows of the table, those measured now in place of those measured before."""
    keys = ("threads", "flow", "features", "samples")
    rows = {tuple(row[k] for k in keys): row for row in (*old, *new)}
    return sorted(rows.values(), key=lambda r: (r["threads"], order.index(r["flow"]), r["features"], r["samples"]))


def filled(page: str, doc: dict[str, Any]) -> str:
    """`page` with what stands between <!-- bench:accelerate --> and <!-- end --> made anew."""
    head, mark, rest = page.partition("<!-- bench:accelerate -->")
    _, end, tail = rest.partition("<!-- end -->")
    return f"{head}{mark}\n{render(doc)}{end}{tail}"


def render(doc: dict[str, Any]) -> str:
    """The measured parts as Markdown."""
    at = doc["machine"]
    lines = [
        f"CPU: {at['cpu']}, threads: {at['threads']}, torch {at['torch']}, float32, `tol=1e-6`. A ratio is "
        "how many times sooner the accelerated inverse is done, the median over pairs of runs on the same "
        "noise; a deviation is the largest |ours - theirs| / max(1, |theirs|).",
    ]
    for part, name in (("table", "Never slower"), ("gradients", "With gradients")):
        for threads in sorted({row["threads"] for row in doc.get(part, [])}):
            rows = [row for row in doc[part] if row["threads"] == threads]
            lines += ["", f"### {name}, threads: {threads}", "", *_table_lines(rows)]
    if "images" in doc:
        lines += ["", "### Rows without a finite inverse, measured", "", _image_lines(doc["images"])]
    if "sbi" in doc:
        lines += ["", "### sbi, end to end", "", *_sbi_lines(doc["sbi"])]
    if "real" in doc:
        lines += ["", "### Packages and many contexts", "", *_real_lines(doc["real"])]
    return "\n".join(lines) + "\n"


def _table_lines(rows: list[dict[str, Any]]) -> list[str]:
    samples = sorted({r["samples"] for r in rows})
    heads = ["flow, two transforms (Pyro one)", "features", *(f"{n:,} samples" for n in samples)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    found = {(r["flow"], r["features"], r["samples"]): r for r in rows}
    for flow, features in dict.fromkeys((r["flow"], r["features"]) for r in rows):
        cells = [found.get((flow, features, n)) for n in samples]
        shown = ["" if c is None else f"{c['ratio']:.2f}x, {1e3 * c['ours_s']:.2f} ms" for c in cells]
        lines.append(f"| {flow} | {features} | " + " | ".join(shown) + " |")
    least = min(rows, key=lambda r: r["ratio"])
    off = max(rows, key=lambda r: r["deviation"])
    lines += [
        "",
        f"Least: {least['ratio']:.2f}x ({least['flow']}, {least['features']} features, {least['samples']} "
        f"samples). Largest deviation: {off['deviation']:.0e} ({off['flow']}, {off['features']} features, "
        f"{off['samples']} samples).",
    ]
    return lines


def _image_lines(r: dict[str, Any]) -> str:
    same = (
        "the same rows as in nflows"
        if r["same_rows"]
        else (
            f"{r['ours_finite_theirs_not']} of those that nflows loses have a finite inverse and get it, "
            f"{r['theirs_finite_ours_not']} the other way round"
        )
    )
    return (
        f"An 8-layer nflows MAF of 16 x 16 MNIST (256 features), trained for {r['epochs']} epochs, "
        f"{r['samples']} noise rows, of which {r['bad_rows']} come back non-finite from nflows: "
        f"{r['theirs_s']:.1f} s become {r['ours_s']:.2f} s for all rows, {r['ratio']:.0f}x. "
        f"Non-finite are {same}. Good rows deviate by {r['deviation_median_row']:.0e} (median row) and "
        f"{r['deviation']:.0e} (worst row); nflows itself is off float64 by {r['their_error']:.0e} in its "
        f"worst row, ours by {r['our_error']:.0e}."
    )


def _sbi_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "NPE with `maf`, the same seed before and after.",
        "",
        "| task | samples | before | after | speed | largest deviation | means differ, in standard errors |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['task']} | {r['samples']} | {r['theirs_s']:.2f} s | {r['ours_s']:.2f} s "
            f"| {r['ratio']:.1f}x | {r['deviation']:.0e} | {r['mean_gap_in_errors']:.3f} |"
        )
    return lines


def _real_lines(doc: dict[str, Any]) -> list[str]:
    heads = ("run", "before", "after", "speed", "peak before", "peak after", "seeds apart", "after apart", "same seed")
    runs = len(doc["rows"][0]["before_seconds"])
    return [
        f"Runs of `benchmarks/accelerate_real.py`, {runs} seeds each, commit {doc['commit']}, threads: "
        f"{doc['threads']}; others kept {doc['busy_elsewhere']} cores busy. Peak memory is that of the process.",
        "",
        "| " + " | ".join(heads) + " |",
        "|---" * len(heads) + "|",
        *map(cells, doc["rows"]),
        "",
        "Seeds apart: the largest difference of means and standard deviations between two seeds of the original, in "
        "standard errors of independent samples, median (largest) over pairs. After apart: the same between the "
        "original and the accelerated run. Same seed: the largest |after - before| / max(1, |before|) where equal "
        "seeds give equal noise; pocoMC's chains depend on roundings.",
    ]
