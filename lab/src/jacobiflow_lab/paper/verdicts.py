"""How each claim of the paper is told from the data of an item: functions of its JSON.

The thresholds stand here, and as words beside the claims.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Verdict = tuple[bool | None, dict[str, float]]  # None: it cannot be told; the numbers by what they are
FEW = 8  # sweeps of a block that converges in a few
MANY = 2  # times the sweeps of any other block: many more
SLIGHT = 0.051  # share by which the paper's own FID rises at most, 9.71 to 10.20


def first_block(data: Any) -> Verdict:
    """Sweeps of the first block against the largest of the others, all swept."""
    first, *others = [layer["mean"] for layer in data["plans"]["uniform, zeros"]["layers"]]
    return first >= MANY * max(others), {"first block": first, "most of the others": max(others)}


def later_blocks(data: Any) -> Verdict:
    """Sweeps of the others in selective decoding."""
    _, *others = [layer["mean"] for layer in data["plans"]["selective, zeros"]["layers"]]
    return max(others) <= FEW, {"least": min(others), "most": max(others)}


def bounded(data: Any) -> Verdict:
    """Sweeps until nothing but rounding is left against the positions, in the layer that needs most."""
    blocks = data["blocks"]
    worst = max(blocks, key=lambda block: block["sweeps"] / block["length"])
    done = all(block["jacobi"][-1] <= 1e-9 * block["jacobi"][0] for block in blocks)
    return (
        done and worst["sweeps"] <= worst["length"],
        {"most sweeps": worst["sweeps"], "positions": worst["length"]},
    )


def ratio_falls(data: Any) -> Verdict:
    """In how many layers the later half of sweeps gains more than the earlier half."""
    told = [block["ratio_falls"] for block in data["blocks"] if block["ratio_falls"] is not None]
    return (all(told) if told else None), {
        "layers where it falls": sum(told),
        "layers with enough sweeps": len(told),
    }


def first_deviates(data: Any) -> Verdict:
    """The first layer against the others, o = 5, in the paper's variant: distance and similarity."""
    masked = next(m for m in data["masked"] if m["o"] == 5 and m["variant"] == "attention")
    first, *others = masked["layers"]
    far, near = max(o["l2"] for o in others), min(o["cosine"] for o in others)
    return (
        first["l2"] > far and first["cosine"] < near,
        {"L2, first": first["l2"], "others": far, "cosine, first": first["cosine"], "others' least": near},
    )


def still_pictures(data: Any) -> Verdict:
    """Distance of masked generations from the standard ones, the paper's variant."""
    far = {row["o"]: row["paired_relative"] for row in data["rows"] if row["variant"] == "attention"}
    rises = far[1] <= far[2] <= far[5]
    return rises and far[5] < 1, {f"o = {o}": value for o, value in far.items()}


def quality_of(data: Any, method: str) -> Verdict:
    """KID of a method against sequential decoding of the same noise; FID beside it."""
    exact, ours = data["quality"]["sequential"], data["quality"][method]
    rises = _rises(exact, ours)
    return None if rises is None else not rises, _judged({"sequential": exact, method: ours})


def worse_above(data: Any) -> Verdict:
    """KID at the largest tau against tau 0.5, on the same noise; FID beside it."""
    rows = {row["method"]: row["quality"] for row in data["rows"]}
    mild, loose = rows["0.5"], rows["2"]
    return _rises(mild, loose), _judged({"tau 0.5": mild, "tau 2": loose})


def _rises(before: Any, after: Any) -> bool | None:
    """Whether KID rises by more than a slight share: at small counts it is not biased, as FID is.

    An estimate of zero or less, which has no share, tells nothing.
    """
    return bool(after["kid"] > (1 + SLIGHT) * before["kid"]) if before["kid"] > 0 else None


def _judged(rows: dict[str, Any]) -> dict[str, float]:
    """KID of each, and FID where it was measured."""
    found = {f"KID, {name}": row["kid"] for name, row in rows.items()}
    return found | {f"FID, {name}": row["fid"] for name, row in rows.items() if row["fid"] is not None}


def faster_with_tau(data: Any) -> Verdict:
    """Seconds at the smallest and at the largest tau."""
    rows = [row for row in data["rows"] if row["method"] != "sequential"]
    first, last = rows[0], rows[-1]
    return (
        last["seconds"] < first["seconds"],
        {f"seconds, tau {first['method']}": first["seconds"], f"tau {last['method']}": last["seconds"]},
    )


def any_guess(data: Any) -> Verdict:
    """Speed-ups from all first guesses, of the best run of each."""
    found = [row["speedup"] * row["seconds"] / min(row["runs"]) for row in data["rows"]]
    sweeps = [sum(row["sweeps"][1:]) for row in data["rows"]]
    return (
        max(found) <= 1.25 * min(found),
        {
            "least speed-up": min(found),
            "most": max(found),
            "least sweeps": min(sweeps),
            "most sweeps": max(sweeps),
        },
    )


def less_memory(data: Any) -> Verdict:
    """Selective decoding without a cache against sequential decoding with one."""
    peaks = {(p["plan"], p["cache"]): p["peak_mib"] for p in data["peaks"]}
    cache, ours = peaks["sequential", True], peaks["selective", False]
    return (
        ours < cache,
        {
            "MiB, sequential with its cache": cache,
            "selective without": ours,
            "selective with": peaks["selective", True],
        },
    )


def first_dominates(data: Any) -> Verdict:
    """The share of the first layer in the seconds of selective decoding."""
    plan = data["plans"]["selective"]
    share = plan["layers"][0]["seconds"] / plan["total"]
    return share >= 0.5, {
        "share of the first layer": share,
        "of the rest that is no layer": plan["shares"][-1],
    }


def reconstructs(data: Any) -> Verdict:
    """The mean squared error of selective decoding."""
    mse = data["rows"]["selective"]["mse"]
    return mse <= 0.007, {"mean squared error": mse}


def speeds(data: Any, key: str, batch: Callable[[list[int]], int]) -> tuple[dict[str, float], int]:
    """Speed-ups of every method at one of the batch sizes."""
    which = batch([row["batch"] for row in data["speed"]])
    return {row["method"]: row[key] for row in data["speed"] if row["batch"] == which}, which


def selective_wins(data: Any) -> Verdict:
    """Whole batches: over public code's loop and uniform decoding, at the largest batch that was timed."""
    found, batch = speeds(data, "whole_against_plain", max)
    ours, uniform = found["selective"], found["uniform"]
    alone = speeds(data, "against_plain", max)[0]["selective"]
    return (
        ours > max(1.0, uniform),
        {"selective": ours, "uniform": uniform, "selective, decoding alone": alone, "batch": batch},
    )


def beats_compiled(data: Any, batch: Callable[[list[int]], int]) -> Verdict:
    """Decoding alone: over our own sequential decoding."""
    found, which = speeds(data, "speedup", batch)
    ours = found["selective"]
    return ours > 1.0, {"selective": ours, "uniform": found["uniform"], "batch": which}


def looks_alike(data: Any) -> Verdict:
    """Mean difference of pictures in grey levels."""
    row = next(row for row in data["rows"] if row["method"] == "selective")
    return row["grey_levels"] <= 2.0, {"grey levels of 255": row["grey_levels"]}


def maf_faster(data: Any) -> Verdict:
    """Sweeps against full passes."""
    found = next(row for row in data["rows"] if row["method"] == "sweeps")
    return found["speedup"] >= 10, {"speed-up": found["speedup"], "largest deviation": found["largest"]}


def digits_alike(data: Any) -> Verdict:
    """Pixels of the paper's decoder that are black or white as by full passes."""
    row = next(row for row in data["rows"] if row["method"].startswith("sweeps, tau"))
    return row["pixels_alike"] >= 0.99, {
        "pixels alike": row["pixels_alike"],
        "largest deviation": row["largest"],
    }


def maf_beats_cache(data: Any) -> Verdict:
    """Sweeps against our sequential decoding with cached hidden units."""
    found = {row["method"]: row["speedup"] for row in data["rows"]}
    return found["sweeps"] > found["sequential, cached"], {
        "sweeps, over full passes": found["sweeps"],
        "sequential, cached": found["sequential, cached"],
    }


def ising_same(data: Any) -> Verdict:
    """Energy by the paper's decoder against sequential decoding of the same noise; beside the exact one."""
    rows = {row["method"]: row.get("observed") for row in data["rows"]}
    exact = rows["sequential, cached"]
    ours = next(seen for name, seen in rows.items() if name.startswith("sweeps, tau"))
    key = "energy_per_site"
    return (
        abs(ours[key] - exact[key]) <= exact[f"{key}_error"],
        {
            "sequential": exact[key],
            "sweeps, tau 0.5": ours[key],
            "standard error": exact[f"{key}_error"],
            "exact": ours["exact_energy_per_site"],
        },
    )


def early_redundancy(data: Any) -> Verdict:
    """Sweeps of the later blocks at the earliest checkpoint that was kept, by the rule of `later_blocks`."""
    _, *others = early(data)
    return max(others) <= FEW, {"step": data["moments"][0]["step"], "most of the others": max(others)}


def early_difference(data: Any) -> Verdict:
    """First block against the others at the earliest checkpoint, by the rule of `first_block`."""
    first, *others = early(data)
    return first >= MANY * max(others), {
        "step": data["moments"][0]["step"],
        "first block": first,
        "most of the others": max(others),
    }


def early(data: Any) -> list[float]:
    """Sweeps of every block, all swept, at the earliest checkpoint."""
    return [layer["mean"] for layer in data["moments"][0]["sweeps"]["layers"]]


def beats(other: str, key: str, factor: float = 1.0) -> Callable[[Any], Verdict]:
    """The flow's FID (KID beside it) or seconds against those of a baseline that counts."""

    def verdict(data: Any) -> Verdict:
        rows = {row["method"]: row for row in data["rows"]}
        ours, theirs = rows["flow, selective"], rows[other]
        numbers = {f"{key}, flow": ours[key], f"{key}, {other}": theirs[key]}
        if key == "fid":
            numbers |= {"KID, flow": ours["kid"], f"KID, {other}": theirs["kid"]}
        return (ours[key] < factor * theirs[key] if theirs["counts"] else None), numbers

    return verdict
