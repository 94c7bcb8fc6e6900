"""The paper's claims: how each is judged, and why it may fail. `claims.toml` has their words and limits.

A rule turns numbers into tests (left, right, margin). A test holds if left is below right by more than the
margin, fails if it is above by more than the margin, and cannot be told otherwise. A claim holds if all its
tests hold, and does not hold if one fails. `printed` has the paper's own numbers, which pass every rule.
"""

from __future__ import annotations

import statistics
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jacobiflow_lab.paper.sampling import AUTO, PREVIOUS, WINDOWS
from jacobiflow_lab.paper.schema import Doc, Docs

Numbers = dict[str, Any]
Test = tuple[float, float, float]
Read = Callable[[Any], Numbers]
Rule = Callable[[Numbers, float], list[Test]]
Reason = Callable[[Numbers, Any], str]
TIME_ERROR = 0.02  # relative uncertainty of a time that was measured once


@dataclass(frozen=True, kw_only=True)
class Judge:
    """How a claim is judged."""

    read: Read  # the numbers, from the data of the item
    rule: Rule  # the tests, from the numbers and the claim's limit; none: it cannot be told
    reason: Reason  # why it does not hold, from the numbers and the data


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says, the rule in words, and its own numbers."""

    name: str
    judge: Judge
    item: str
    text: str
    paper: str  # what it prints
    holds_if: str
    limit: float = 0.0
    printed: tuple[Numbers, ...] = ()  # the paper's own numbers
    unprinted: str = ""  # why there are none
    section: str = ""  # of the page; default: the item's
    ours: bool = False  # not a claim of the paper: a question it leaves open, or one about our code
    models: tuple[str, ...] = ()  # that it is about; (): all of the item's

    def tests(self, numbers: Numbers) -> list[Test]:
        """The tests of these numbers."""
        return self.judge.rule(numbers, self.limit)


def decide(tests: list[Test]) -> bool | None:
    """Whether all tests hold; None: it cannot be told.

    >>> decide([(1.0, 2.0, 0.5)]), decide([(1.0, 2.0, 0.5), (3.0, 2.0, 0.5)]), decide([(1.0, 1.2, 0.5)])
    (True, False, None)
    """
    outcomes = [True if a < b - margin else False if a >= b + margin else None for a, b, margin in tests]
    if False in outcomes:
        return False
    return None if None in outcomes or not outcomes else True


def why_open(tests: list[Test]) -> str:
    """Why the tests decide nothing."""
    close = [(a, b, margin) for a, b, margin in tests if abs(a - b) <= margin]
    if not close:
        return "The run has too little to decide it."
    a, b, margin = close[0]
    text = f"{a:.4g} and {b:.4g} are closer than the uncertainty of {margin:.2g} at this sample size."
    times = (margin / abs(a - b)) ** 2 if a != b else float("inf")
    return text + (f" About {times:.0f} times as many samples would decide it." if 2 <= times < 1000 else "")


def judge_claims(docs: Mapping[str, Docs]) -> list[Doc]:
    """Every claim on every model that it was measured on."""
    described = ("name", "item", "text", "paper", "holds_if", "ours")
    found = []
    for claim in CLAIMS:
        rows = docs.get(claim.item, {})
        models = {m: judge(claim, doc) for m, doc in rows.items() if not claim.models or m in claim.models}
        about = {key: getattr(claim, key) for key in described} | {"section": claim.section or claim.item}
        found.append(about | {"models": models})
    return found


def judge(claim: Claim, doc: Doc) -> Doc:
    """One claim on one model."""
    if "missing" in doc:
        return {"missing": doc["missing"]}
    try:
        numbers = claim.judge.read(doc["data"])
        tests = claim.tests(numbers)
    except (LookupError, StopIteration, TypeError, ArithmeticError):  # the run left out what the rule needs
        return {"missing": doc.get("lacking", f"the run of {claim.item} measured too little to decide")}
    holds = decide(tests)
    reason = "" if holds else why_open(tests) if holds is None else claim.judge.reason(numbers, doc["data"])
    return {"holds": holds, "numbers": numbers, "reason": reason}


def verdict_word(entry: Doc | None) -> str:
    """holds, does not hold, cannot be told or not measured."""
    if not entry or "missing" in entry:
        return "not measured"
    return {True: "holds", False: "does not hold", None: "cannot be told"}[entry["holds"]]


# What is read


def named(rows: list[Any], key: str, start: str) -> Any:
    """The first row whose `key` starts with these words."""
    return next(row for row in rows if row[key].startswith(start))


def method(data: Any, start: str) -> Any:
    """The first row whose method starts with these words."""
    return named(data["rows"], "method", start)


def timed(backend: str, pick: Callable[[list[int]], int]) -> Read:
    """Seconds of whole batches by the paper's methods, and their largest deviation between runs."""

    def read(data: Any) -> Numbers:
        rows = [r for r in data["compare"] if (r["backend"] == "torch") == (backend == "torch")]
        batch = pick([row["batch"] for row in rows])
        rows = [row for row in rows if row["batch"] == batch and row["plan"] != "plain loop"]
        seconds = {row["plan"]: row["whole"] for row in rows}
        spread = max(row["whole_spread"] for row in rows)
        speedup = {"speed-up": seconds["sequential"] / seconds["selective"], "K": data["K"], "batch": batch}
        return (
            speedup | {name: seconds[name] for name in ("sequential", "uniform", "selective")} | {"±": spread}
        )

    return read


def block_seconds(data: Any, backend: str = "torch") -> Numbers:
    """The fastest and the slowest block by sequential decoding."""
    seconds = [row["sequential"]["seconds"] for row in data["blocks"][backend]["rows"]]
    return {"fastest": min(seconds), "slowest": max(seconds)}


def guesses(data: Any) -> Numbers:
    """Seconds of decoding from the best and from the worst first guess, in torch."""
    rows = [row for row in data["guesses"] if row["backend"] == "torch"]
    seconds = [row["seconds"] for row in rows]
    return {"fastest": min(seconds), "slowest": max(seconds), "±": max(row["spread"] for row in rows)}


def swept(plan: str) -> Read:
    """The sweeps of each block, and two standard errors."""
    return lambda data: sweeps_of(data["plans"][plan]["layers"])


def sweeps_of(layers: list[Any]) -> Numbers:
    """The sweeps of each block, and two standard errors."""
    return {"sweeps": [layer["mean"] for layer in layers], "±": 2 * max(layer["error"] for layer in layers)}


def changes(change: Any) -> Numbers:
    """Relative changes of FID and KID, as far as they were measured, and half of their intervals."""
    found: Numbers = {}
    for name in ("FID", "KID"):
        if one := change.get(name.lower()):
            half = max(one["high"] - one["value"], one["value"] - one["low"])
            found |= {f"{name} change": one["value"], f"± {name}": half}
    return found


def squared_error(row: Any) -> Numbers:
    """The mean squared error, and two standard errors."""
    return {"mean squared error": row["mse"], "±": 2 * row["mse_error"]}


def masked_first(data: Any) -> Numbers:
    """The first block beside the most affected of the others, at the largest o."""
    first, *others = [m for m in data["masked"] if m["variant"] == "attention"][-1]["layers"]
    far = max(others, key=lambda layer: layer["l2"])
    return {
        "L2, first": first["l2"],
        "L2, others": far["l2"],
        "cosine, first": first["cosine"],
        "cosine, others": min(layer["cosine"] for layer in others),
        "±": 2 * (first["l2_error"] ** 2 + far["l2_error"] ** 2) ** 0.5,
    }


def pictures(data: Any) -> Numbers:
    """Distances of masked pictures by o, and two standard errors."""
    rows = [row for row in data["rows"] if row["variant"] == "attention"]
    far = {f"o = {row['o']}": row["paired_relative"] for row in rows}
    return far | {"±": 2 * max(row["paired_error"] for row in rows)}


def generator(other: str, key: str) -> Read:
    """The flow's FID or seconds beside a baseline's, with the sum of their deviations."""

    def read(data: Any) -> Numbers:
        ours, theirs = method(data, "flow, selective"), method(data, other)
        margin = ours[f"{key}_spread"] + theirs[f"{key}_spread"]
        return {"flow": ours[key], other: theirs[key], "±": margin, "counts": theirs["counts"]}

    return read


# Rules


def below(left: str, right: str) -> Rule:
    """The first number is below the second, or below `limit` times it, by more than "±".

    A baseline that does not count, because it hardly beats shuffled pixels, decides nothing.
    """
    return lambda n, limit: [(n[left], (limit or 1.0) * n[right], n["±"])] if n.get("counts", True) else []


def small_changes(n: Numbers, limit: float) -> list[Test]:
    """Neither FID nor KID rises by more than the limit."""
    return [(n[f"{s} change"], limit, n[f"± {s}"]) for s in ("FID", "KID") if f"{s} change" in n]


def first_stands_out(n: Numbers, limit: float) -> list[Test]:
    """The first block needs `limit` times the sweeps of any other."""
    first, *others = n["sweeps"]
    return [(max(others), first / limit, n.get("±", 0.0))]


def min_difference(n: Numbers) -> float:
    """The smallest difference of seconds between two of the paper's methods."""
    a, b, c = sorted(n[name] for name in ("sequential", "uniform", "selective"))
    return float(min(b - a, c - b))


# Reasons


def other_batch(backend: str, pick: Callable[[list[int]], int]) -> Reason:
    """Tested: the same at the other batch size."""

    def reason(n: Numbers, data: Any) -> str:
        there = timed(backend, pick)(data)
        return (
            "A sweep computes all L positions where a step of sequential decoding computes one: this pays "
            f"while the hardware is not busy. Tested at batch {there['batch']}: the speed-up is "
            f"{there['sequential'] / there['selective']:.2f}x there and "
            f"{n['sequential'] / n['selective']:.2f}x here."
        )

    return reason


def first_by_steps(n: Numbers, data: Any) -> str:
    """Tested: what sequential decoding of the first block costs in each backend."""
    first = {name: found["rows"][0]["sequential"]["seconds"] for name, found in data["blocks"].items()}
    told = ", ".join(f"{seconds:.3g} s ({name})" for name, seconds in first.items())
    return f"It depends on what the L - 1 steps of the first block cost. Tested by backend: {told}."


def better_guess(n: Numbers, data: Any) -> str:
    """Tested: the block's input as first guess instead of zeros."""
    zeros, given = (data["quality"][name]["paired_relative"] for name in ("selective", PREVIOUS))
    return (
        "Stopping at tau 0.5 leaves an error that later blocks amplify. Tested with the block's input as "
        f"first guess instead of zeros: the paired distance is {given:.3g} instead of {zeros:.3g}."
    )


def better_error(n: Numbers, data: Any) -> str:
    """Tested: the block's input as first guess instead of zeros."""
    rows = data["rows"]
    other = rows[PREVIOUS] if isinstance(rows, dict) else named(rows, "method", PREVIOUS)
    return (
        "The error that tau 0.5 leaves depends on the weights and the first guess. Tested with the block's "
        f"input instead of zeros: the mean squared error is {other['mse']:.2g}."
    )


def untested(text: str) -> Reason:
    """A reason that needs other weights or another machine to be tested."""
    return lambda n, data: f"{text} This is not tested."


LESS_TRAINED = untested("All three were trained for about an hour, of which the flow makes the least.")
FAST_CACHE = untested(
    "Compiled steps find the weights in the processor's cache, so that fewer steps save little."
)


def speed(backend: str) -> dict[str, Judge]:
    """Selective against sequential and uniform decoding in one backend at both batch sizes."""
    found, tag = {}, "" if backend == "torch" else "-compiled"
    for pick, other, size in ((max, min, ""), (min, max, "-small-batch")):
        read, reason = timed(backend, pick), other_batch(backend, other)
        found[f"faster{size}{tag}"] = Judge(read=read, rule=below("selective", "sequential"), reason=reason)
        rule = below("selective", "uniform")
        found[f"beats-uniform{size}{tag}"] = Judge(read=read, rule=rule, reason=first_by_steps)
    return found


JUDGES: dict[str, Judge] = {
    **speed("torch"),
    **speed("compiled"),
    "uniform-faster": Judge(
        read=timed("torch", max), rule=below("uniform", "sequential"), reason=other_batch("torch", min)
    ),
    "uniform-loses": Judge(
        read=lambda data: {"loses above": data["rows"][0]["loses_above"], "L": data["L"]},
        rule=lambda n, limit: [(n["loses above"], limit, 0.05 * limit)],
        reason=lambda n, data: (
            "Beside a step, a sweep is cheaper here than on the paper's GPUs: uniform decoding "
            f"loses above {n['loses above']:.0f} sweeps of block 1, of at most {n['L'] - 1}."
        ),
    ),
    "equal-blocks": Judge(
        read=block_seconds,
        rule=lambda n, limit: [(n["slowest"], limit * n["fastest"], TIME_ERROR * n["fastest"])],
        reason=lambda n, data: (
            "All blocks do the same work, so that a difference is one of the machine. Tested "
            "compiled: {fastest:.3g} s to {slowest:.3g} s.".format(
                **block_seconds(data, list(data["blocks"])[-1])
            )
        ),
    ),
    "first-dominates": Judge(
        read=lambda data: {
            "share of the first block": data["blocks"]["torch"]["rows"][0]["selective"]["share"]
        },
        rule=lambda n, limit: [(limit, n["share of the first block"], 0.01)],
        reason=first_by_steps,
    ),
    "runs-agree": Judge(
        read=timed("torch", max),
        rule=lambda n, limit: [(n["±"], min_difference(n), 0.0)],
        reason=lambda n, data: (
            f"Two methods differ by {min_difference(n):.3g} s only, a run by {n['±']:.2g} s."
        ),
    ),
    "auto": Judge(
        read=lambda data: {f"batch {r['batch']}": r["speedup"] for r in data["beyond"] if r["plan"] == AUTO},
        rule=lambda n, limit: [(1 / limit, speedup, 0.0) for speedup in n.values()],
        reason=untested("The cost model misjudges this machine."),
    ),
    "windows": Judge(
        read=lambda data: {
            name: named(data["small_batch"], "plan", name)["seconds"] for name in (WINDOWS, PREVIOUS)
        },
        rule=lambda n, limit: [(n[WINDOWS], n[PREVIOUS], TIME_ERROR * n[PREVIOUS])],
        reason=FAST_CACHE,
    ),
    "quality": Judge(
        read=lambda data: changes(data["quality"]["selective"]["change"]),
        rule=small_changes,
        reason=better_guess,
    ),
    "quality-uniform": Judge(
        read=lambda data: changes(data["quality"]["uniform"]["change"]),
        rule=small_changes,
        reason=better_guess,
    ),
    "brisque": Judge(
        read=lambda data: {
            "change": data["quality"]["selective"]["change"]["brisque"]["value"],
            "±": (lambda c: c["high"] - c["value"])(data["quality"]["selective"]["change"]["brisque"]),
        },
        rule=lambda n, limit: [(n["change"], limit, n["±"])],
        reason=better_guess,
    ),
    "worse-above": Judge(
        read=lambda data: changes(method(data, "2")["quality"]["change"]),
        rule=lambda n, limit: [(-a, -b, margin) for a, b, margin in small_changes(n, 0.0)],
        reason=untested("The later blocks converge so fast that tau hardly changes the answer."),
    ),
    "faster-with-tau": Judge(
        read=lambda data: {
            "smallest tau": data["taus"][0]["seconds"],
            "largest tau": data["taus"][-1]["seconds"],
            "±": max(row["spread"] for row in data["taus"]),
        },
        rule=below("largest tau", "smallest tau"),
        reason=first_by_steps,
    ),
    "first-guess": Judge(
        read=guesses,
        rule=below("slowest", "fastest"),
        reason=lambda n, data: (
            "Tested by the sweeps of blocks 2 to K: "
            + ", ".join(
                f"{sum(b['sweeps'] for b in r['layers'][1:]):.1f} ({r['plan']})" for r in data["guesses"][:3]
            )
            + ". A guess near the answer saves some of the few that there are."
        ),
    ),
    "first-block": Judge(
        read=swept("uniform, zeros"),
        rule=first_stands_out,
        reason=untested("Models with few positions or little training need the preceding positions less."),
    ),
    "later-blocks": Judge(
        read=swept("selective, zeros"),
        rule=lambda n, limit: [(statistics.median(n["sweeps"][1:]), limit, n.get("±", 0.0))],
        reason=untested("The later blocks of this model depend more on the preceding positions."),
    ),
    "second-block": Judge(
        read=swept("selective, zeros"),
        rule=lambda n, limit: first_stands_out(n | {"sweeps": n["sweeps"][1:]}, limit),
        reason=untested(
            "Not seen here; the paper sees it on CIFAR-10, but not on CIFAR-100 with the same shape."
        ),
    ),
    "bounded": Judge(
        read=lambda data: {
            "most sweeps": max(block["sweeps"] for block in data["blocks"]),
            "L": data["blocks"][0]["length"],
            "error left": max(block["jacobi"][-1] / block["jacobi"][0] for block in data["blocks"]),
        },
        rule=lambda n, limit: [(n["most sweeps"], n["L"] + 0.5, 0.0), (n["error left"], 1e-9, 0.0)],
        reason=untested("It is a theorem, so that the code or the arithmetic is wrong."),
    ),
    "superlinear": Judge(
        read=lambda data: {
            "blocks where it falls": sum(block["ratio_falls"] is True for block in data["blocks"]),
            "blocks with enough sweeps": sum(block["ratio_falls"] is not None for block in data["blocks"]),
        },
        rule=lambda n, limit: (
            [(a, n["blocks where it falls"] + 0.5, 0.0)] if (a := n["blocks with enough sweeps"]) else []
        ),
        reason=lambda n, data: (
            "A strictly triangular Jacobian bounds the number of sweeps, not the gain of a single "
            "one: while errors travel along the sequence, sweeps gain little."
        ),
    ),
    "first-layer-deviates": Judge(
        read=masked_first,
        rule=lambda n, limit: [
            (n["L2, others"], n["L2, first"], n["±"]),
            (n["cosine, first"], n["cosine, others"], 0.0),
        ],
        reason=untested("In this model another block depends more on the nearest positions."),
    ),
    "still-pictures": Judge(
        read=pictures,
        rule=lambda n, limit: [
            (n["o = 1"], n["o = 2"], n["±"]),
            (n["o = 2"], n["o = 5"], n["±"]),
            (n["o = 5"], 1.0, n["±"]),
        ],
        reason=lambda n, data: (
            "Tested with strict masking, which lets nothing through: "
            + ", ".join(
                f"{r['paired_relative']:.2f} (o = {r['o']})" for r in data["rows"] if r["variant"] == "strict"
            )
            + "."
        ),
    ),
    "memory": Judge(
        read=lambda data: {f"{p['plan']}, cache: {p['cache']}": p["mib"] for p in data["peaks"]},
        rule=lambda n, limit: [
            (n["selective, cache: first"], n["sequential, cache: all"], 0.02 * n["sequential, cache: all"])
        ],
        reason=lambda n, data: (
            "A sweep holds the activations of all L positions, which exceed the cache of this "
            f"model. Tested without any cache: {n['selective, cache: none']:.1f} MiB."
        ),
    ),
    "memory-length": Judge(
        read=lambda data: {
            f"ratio at L {r['L']}": named(r["peaks"][2:], "cache", "first")["mib"] / r["peaks"][0]["mib"]
            for r in data["rows"]
        },
        rule=lambda n, limit: [(ratio, 1.0, 0.02) for ratio in n.values()],
        reason=untested("With two blocks the cache is small beside the activations of a sweep."),
    ),
    "alike": Judge(
        read=lambda data: squared_error(method(data, "selective")),
        rule=lambda n, limit: [(n["mean squared error"], limit, n["±"])],
        reason=better_error,
    ),
    "reconstruction": Judge(
        read=lambda data: squared_error(data["rows"]["selective"]),
        rule=lambda n, limit: [(n["mean squared error"], limit, n["±"])],
        reason=better_error,
    ),
    **dict.fromkeys(
        ("maf-mnist", "maf-ising-faster"),
        Judge(
            read=lambda data: {"speed-up": method(data, "sweeps")["speedup"]},
            rule=lambda n, limit: [(limit, n["speed-up"], TIME_ERROR * n["speed-up"])],
            reason=lambda n, data: (
                "The speed-up is at most the positions over the sweeps. Tested with a cache: "
                f"sequential decoding is {method(data, 'sequential, cached')['speedup']:.1f}x."
            ),
        ),
    ),
    "maf-mnist-alike": Judge(
        read=lambda data: {"pixels alike": method(data, "sweeps, tau")["pixels_alike"]},
        rule=lambda n, limit: [(limit, n["pixels alike"], 0.001)],
        reason=lambda n, data: (
            "Tau 0.5 is half of the distance between black and white. Tested at the default "
            f"tolerance: {method(data, 'sweeps')['pixels_alike']:.2%} of pixels are the same."
        ),
    ),
    **dict.fromkeys(
        ("maf-mnist-cache", "maf-ising-cache"),
        Judge(
            read=lambda data: {
                name: method(data, name)["speedup"] for name in ("sweeps", "sequential, cached")
            },
            rule=lambda n, limit: [(n["sequential, cached"], n["sweeps"], TIME_ERROR * n["sweeps"])],
            reason=lambda n, data: (
                "Each hidden unit is computed once with the cache, and once per sweep by sweeps."
            ),
        ),
    ),
    "maf-ising": Judge(
        read=lambda data: {
            "sequential": method(data, "sequential, cached")["observed"]["energy_per_site"],
            "sweeps, tau 0.5": method(data, "sweeps, tau")["observed"]["energy_per_site"],
            "standard error": method(data, "sequential, cached")["observed"]["energy_per_site_error"],
            "exact": data["known"]["exact_energy_per_site"],
        },
        rule=lambda n, limit: [
            (abs(n["sequential"] - n["sweeps, tau 0.5"]), limit * 2**0.5 * n["standard error"], 0.0)
        ],
        reason=lambda n, data: (
            "Tau 0.5 is coarse beside fields of order one. Tested at the default tolerance: "
            f"the energy is {method(data, 'sweeps')['observed']['energy_per_site']:.4f}."
        ),
    ),
    "generators": Judge(
        read=generator("DDIM, 20 steps", "fid"), rule=below("flow", "DDIM, 20 steps"), reason=LESS_TRAINED
    ),
    "generators-gan": Judge(
        read=generator("FastGAN", "fid"), rule=below("flow", "FastGAN"), reason=LESS_TRAINED
    ),
    "generators-speed": Judge(
        read=generator("FastGAN", "seconds"),
        rule=below("flow", "FastGAN"),
        reason=untested("A GAN draws all pixels in one pass; the paper's is far larger than ours."),
    ),
    "ddim-faster": Judge(
        read=generator("DDIM, 20 steps", "seconds"),
        rule=below("DDIM, 20 steps", "flow"),
        reason=untested("Twenty passes of a UNet cost more than the sweeps of a flow of this size."),
    ),
    "undertrained": Judge(
        read=lambda data: (
            sweeps_of(data["moments"][0]["sweeps"]["layers"]) | {"step": data["moments"][0]["step"]}
        ),
        rule=lambda n, limit: [(max(n["sweeps"][1:]), limit, n["±"])],
        reason=lambda n, data: (
            f"At step {n['step']} a later block needs {max(n['sweeps'][1:]):.1f} sweeps. Tested at "
            f"the last step: {max(sweeps_of(data['moments'][-1]['sweeps']['layers'])['sweeps'][1:]):.1f}."
        ),
    ),
    "undertrained-first": Judge(
        read=lambda data: (
            sweeps_of(data["moments"][0]["sweeps"]["layers"]) | {"step": data["moments"][0]["step"]}
        ),
        rule=first_stands_out,
        reason=lambda n, data: (
            "The difference grows with training. Tested at the last step: sweeps "
            + " ".join(f"{mean:.1f}" for mean in sweeps_of(data["moments"][-1]["sweeps"]["layers"])["sweeps"])
            + "."
        ),
    ),
}


def _claims() -> list[Claim]:
    """The claims of the file, with their judges."""
    text = (files("jacobiflow_lab.paper") / "claims.toml").read_text(encoding="utf-8")
    found = []
    for name, fields in tomllib.loads(text).items():
        fields["holds_if"] = fields["holds_if"].format(limit=fields.get("limit"))
        fields |= {key: tuple(fields.get(key, ())) for key in ("printed", "models")}
        found.append(Claim(name=name, judge=JUDGES[name], **fields))
    return found


CLAIMS = _claims()
