"""Documents of measured figures are what their commands make of the JSON beside them."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import accelerate, ising, regimes  # noqa: E402
from benchmarks.accelerate_report import filled, merged, render  # noqa: E402


def doc(name: str, part: str) -> Any:
    path = ROOT / f"docs/bench/{name}.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if part not in found:
        pytest.skip(f"{part} is not measured: make bench ARGS={name}")
    return found


def test_the_page_of_acceleration_is_made_of_its_figures() -> None:
    page = (ROOT / accelerate.PAGE).read_text(encoding="utf-8")
    assert page == filled(page, doc("accelerate", "machine"))


def test_the_page_of_regimes_is_made_of_its_figures() -> None:
    page = regimes.PAGE.read_text(encoding="utf-8")
    assert page == regimes.filled(page, doc("regimes", "checks"))


def test_acceleration_was_never_slower_when_it_was_measured() -> None:
    rows = {(r["threads"], r["flow"], r["features"], r["samples"]): r for r in doc("accelerate", "table")["table"]}
    threads = {r["threads"] for r in rows.values()}
    assert set(rows) == set(product(threads, accelerate.FLOWS, accelerate.FEATURES, accelerate.SAMPLES))
    assert min(r["ratio"] for r in rows.values()) >= 0.95
    for (_, flow, features, _), row in rows.items():
        if "affine" in flow or flow == "zuko MAF":
            assert row["ratio"] >= {32: 4, 128: 20}.get(features, 0.95)


def test_gradients_were_never_slower_when_they_were_measured() -> None:
    """Where the original runs, the question which way to take costs a few microseconds."""
    rows = doc("accelerate", "gradients")["gradients"]
    assert min(r["ratio"] for r in rows) >= 0.9


def test_the_ising_card_is_made_of_its_figures() -> None:
    found = doc("ising", "physics")
    assert (ROOT / ising.CARD).read_text(encoding="utf-8") == ising.card(found)
    assert found["physics"]["samples"] == 100_000


def test_a_run_keeps_what_it_does_not_measure() -> None:
    row = {"threads": 1, "features": 2, "samples": 1, "ours_s": 0.5, "deviation": 1e-6}
    old = [{"flow": "b", "ratio": 1.0} | row, {"flow": "a", "ratio": 1.0} | row]
    rows = merged(old, [{"flow": "b", "ratio": 2.0} | row], ["a", "b"])
    assert [(r["flow"], r["ratio"]) for r in rows] == [("a", 1.0), ("b", 2.0)]
    text = render({"machine": {"cpu": "one", "threads": 1, "torch": "2"}, "table": rows})
    assert "| b | 2 | 2.00x, 500.00 ms |" in text
    assert "Least: 1.00x (a, 2 features, 1 samples)" in text
    page = "before\n<!-- bench:accelerate -->\nold\n<!-- end -->\nafter\n"
    again = filled(page, {"machine": {"cpu": "one", "threads": 1, "torch": "2"}, "table": rows})
    assert again.startswith("before\n")
    assert again.endswith("<!-- end -->\nafter\n")
    assert "old" not in again
