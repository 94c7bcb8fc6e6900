"""The paper's claims. Each stands right above the rule that judges it from the JSON of an item."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Verdict = tuple[bool | None, dict[str, float]]  # None: undecided; the numbers behind it by name
Rule = Callable[..., Verdict]
FEW_SWEEPS = 8
MANY_TIMES = 2  # the sweeps of any other block are "many more"
KID_RISE = 0.051  # relative; as much as the paper's own FID rises at most, 9.71 to 10.20


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the paper says, when we say yes, and the rule that tells."""

    name: str
    item: str
    text: str
    paper: str  # its own numbers
    holds_if: str
    rule: Rule
    ours: bool = False  # not a claim of the paper: a question it leaves open, or one about our code
    models: tuple[str, ...] = ()  # that it is about; (): all of the item's


CLAIMS: list[Claim] = []


def claim(
    item: str, name: str, *, text: str = "", given: Mapping[str, Any] | None = None, **fields: Any
) -> Callable[[Rule], Rule]:
    """Add a claim that the function below judges. given: further arguments of that function.

    The function's docstring has the claim, unless `text` is given, and then the rule, after "Yes if".
    """

    def add(rule: Rule) -> Rule:
        said, _, condition = (inspect.getdoc(rule) or "").partition("\n\nYes if")
        holds_if = " ".join(condition.split()).strip(",. ")
        judged = partial(rule, **(given or {}))
        CLAIMS.append(
            Claim(item=item, name=name, text=text or said, holds_if=holds_if, rule=judged, **fields)
        )
        return rule

    return add


@claim("sweeps", "first-block", paper="shown for AFHQ by curves")
def first_block(data: Any) -> Verdict:
    """The first block needs many more sweeps than the others.

    Yes if it needs at least 2 times the sweeps of any other block, all blocks swept at tau 0.5 from zeros.
    """
    first, *others = [block["mean"] for block in data["plans"]["uniform, zeros"]["layers"]]
    return first >= MANY_TIMES * max(others), {"first block": first, "most of the others": max(others)}


@claim("sweeps", "later-blocks", paper="3.0 to 7.5, with one exception of 53.9")
def later_blocks(data: Any) -> Verdict:
    """The later blocks converge in a few sweeps at tau 0.5.

    Yes if they need at most 8, mean over samples, selective from zeros.
    """
    _, *others = [block["mean"] for block in data["plans"]["selective, zeros"]["layers"]]
    return max(others) <= FEW_SWEEPS, {"least": min(others), "most": max(others)}


@claim("convergence", "bounded", paper="proved")
def bounded(data: Any) -> Verdict:
    """There are never more sweeps than positions.

    Yes if in every block only rounding (1e-9 of the first error) is left after at most that many.
    """
    blocks = data["blocks"]
    worst = max(blocks, key=lambda block: block["sweeps"] / block["length"])
    done = all(block["jacobi"][-1] <= 1e-9 * block["jacobi"][0] for block in blocks)
    numbers = {"most sweeps": worst["sweeps"], "positions": worst["length"]}
    return done and worst["sweeps"] <= worst["length"], numbers


@claim("convergence", "superlinear", paper="proved near the answer")
def ratio_falls(data: Any) -> Verdict:
    """The ratio of successive errors falls as sweeps converge.

    Yes if in every block with enough sweeps, the later half gains more per sweep than the earlier half.
    """
    falls = [block["ratio_falls"] for block in data["blocks"] if block["ratio_falls"] is not None]
    numbers = {"blocks where it falls": sum(falls), "blocks with enough sweeps": len(falls)}
    return (all(falls) if falls else None), numbers


@claim("similarity", "first-layer-deviates", paper="shown for CIFAR-100 and AFHQ by curves")
def first_deviates(data: Any) -> Verdict:
    """The first block suffers most from masked dependencies.

    Yes if, with attention masked at o = 5, its L2 distance is the largest and its cosine similarity the
    smallest.
    """
    masked = next(m for m in data["masked"] if m["o"] == 5 and m["variant"] == "attention")
    first, *others = masked["layers"]
    far, near = max(o["l2"] for o in others), min(o["cosine"] for o in others)
    return (
        first["l2"] > far and first["cosine"] < near,
        {"L2, first": first["l2"], "others": far, "cosine, first": first["cosine"], "others' least": near},
    )


@claim("masked", "still-pictures", paper="shown by pictures")
def still_pictures(data: Any) -> Verdict:
    """Generations with masked dependencies get worse with o but stay recognizable.

    Yes if, with attention masked, the distance from the standard picture grows with o, and at o = 5 it is
    below the distance between different pictures.
    """
    far = {row["o"]: row["paired_relative"] for row in data["rows"] if row["variant"] == "attention"}
    return far[1] <= far[2] <= far[5] < 1, {f"o = {o}": value for o, value in far.items()}


def speeds(data: Any, key: str, pick_batch: Callable[[list[int]], int]) -> tuple[dict[str, float], int]:
    """Speed-ups of every method at the smallest or largest batch size."""
    batch = pick_batch([row["batch"] for row in data["speed"]])
    return {row["method"]: row[key] for row in data["speed"] if row["batch"] == batch}, batch


@claim("comparison", "faster", paper="3.6x, 4.7x and 4.5x at batch 256 on GPUs; uniform 2.4x, 2.9x and 0.8x")
def selective_wins(data: Any) -> Verdict:
    """Selective decoding beats public code's sequential loop and uniform decoding at the largest batch size.

    Yes if, for whole batches, its speed-up over that loop is above 1 and above uniform's; our first block is
    compiled, the loop is not.
    """
    whole, batch = speeds(data, "whole_against_plain", max)
    ours, uniform = whole["selective"], whole["uniform"]
    alone = speeds(data, "against_plain", max)[0]["selective"]
    numbers = {"selective": ours, "uniform": uniform, "selective, decoding alone": alone, "batch": batch}
    return ours > max(1.0, uniform), numbers


@claim(
    "comparison",
    "faster-alone",
    text="Selective decoding beats our compiled sequential decoding at the smallest batch size.",
    paper="has no such decoder",
    given={"pick_batch": min},
    ours=True,
)
@claim(
    "comparison", "faster-than-compiled", paper="has no such decoder", given={"pick_batch": max}, ours=True
)
def beats_compiled(data: Any, pick_batch: Callable[[list[int]], int]) -> Verdict:
    """Selective decoding beats our compiled sequential decoding at the largest batch size.

    Yes if its speed-up of decoding alone is above 1.
    """
    alone, batch = speeds(data, "speedup", pick_batch)
    numbers = {"selective": alone["selective"], "uniform": alone["uniform"], "batch": batch}
    return alone["selective"] > 1.0, numbers


@claim("runtime", "first-dominates", paper="56%, 77% and 52% of it")
def first_dominates(data: Any) -> Verdict:
    """The first block takes most of the time of selective decoding.

    Yes if it takes at least 50% of the seconds of a batch.
    """
    plan = data["plans"]["selective"]
    share = plan["layers"][0]["seconds"] / plan["total"]
    return share >= 0.5, {
        "share of the first block": share,
        "share outside all blocks": plan["shares"][-1],
    }


@claim("memory", "memory", paper="5.2 GB against 7.8 GB")
def less_memory(data: Any) -> Verdict:
    """Selective decoding needs less memory than the cache of sequential decoding.

    Yes if its peak is lower when no block keeps a cache; the paper's first block does.
    """
    peaks = {(p["plan"], p["cache"]): p["peak_mib"] for p in data["peaks"]}
    exact, ours = peaks["sequential", True], peaks["selective", False]
    numbers = {"MiB, sequential with its cache": exact, "selective without": ours}
    return ours < exact, numbers | {"selective with": peaks["selective", True]}


def kid_rises(before: Any, after: Any) -> bool | None:
    """Whether KID, unbiased at small counts, rises by more than KID_RISE. None: KID is not positive."""
    return bool(after["kid"] > (1 + KID_RISE) * before["kid"]) if before["kid"] > 0 else None


def scores(rows: dict[str, Any]) -> dict[str, float]:
    """KID of each, and FID where it was measured."""
    found = {f"KID, {name}": row["kid"] for name, row in rows.items()}
    return found | {f"FID, {name}": row["fid"] for name, row in rows.items() if row["fid"] is not None}


@claim(
    "comparison",
    "quality-uniform",
    text="Uniform decoding at tau 0.5 keeps the quality, too.",
    paper="FID 9.71 to 10.19, 8.22 to 8.26, 15.42 to 15.44",
    given={"method": "uniform"},
)
@claim(
    "comparison",
    "quality",
    paper="FID 9.71 to 10.20 (5%), 8.22 to 8.19, 15.42 to 15.44",
    given={"method": "selective"},
)
def quality_of(data: Any, method: str) -> Verdict:
    """Quality at tau 0.5 is within a small degradation of sequential decoding.

    Yes if KID of the same noise rises by at most 5.1%, as the paper's FID does.
    """
    exact, ours = data["quality"]["sequential"], data["quality"][method]
    rises = kid_rises(exact, ours)
    return None if rises is None else not rises, scores({"sequential": exact, method: ours})


@claim("tolerance", "worse-above", paper="shown by curves")
def worse_above(data: Any) -> Verdict:
    """Quality is worse for tau above 1.

    Yes if from tau 0.5 to 2, KID of the same noise rises by more than 5.1%.
    """
    rows = {row["method"]: row["quality"] for row in data["rows"]}
    mild, loose = rows["0.5"], rows["2"]
    return kid_rises(mild, loose), scores({"tau 0.5": mild, "tau 2": loose})


@claim("tolerance", "faster-with-tau", paper="shown by curves")
def faster_with_tau(data: Any) -> Verdict:
    """Time falls as tau grows.

    Yes if a batch takes less time at the largest tau than at the smallest.
    """
    first, *_, last = [row for row in data["rows"] if row["method"] != "sequential"]
    numbers = {f"seconds, tau {first['method']}": first["seconds"], f"tau {last['method']}": last["seconds"]}
    return last["seconds"] < first["seconds"], numbers


@claim("initialisation", "first-guess", paper="shown by a plot")
def any_guess(data: Any) -> Verdict:
    """The first guess hardly matters.

    Yes if the best speed-up is at most 1.25 times the worst, of the best run of each.
    """
    best = [row["speedup"] * row["seconds"] / min(row["runs"]) for row in data["rows"]]
    sweeps = [sum(row["sweeps"][1:]) for row in data["rows"]]
    numbers = {"least speed-up": min(best), "most": max(best)}
    return max(best) <= 1.25 * min(best), numbers | {
        "least sweeps": min(sweeps),
        "most sweeps": max(sweeps),
    }


@claim("reconstruction", "reconstruction", paper="0.00636, 0.00313 and 0.00122")
def reconstructs(data: Any) -> Verdict:
    """Reconstruction at tau 0.5 is near perfect.

    Yes if the mean squared error is at most 0.007, selective from zeros.
    """
    mse = data["rows"]["selective"]["mse"]
    return mse <= 0.007, {"mean squared error": mse}


@claim("samples", "alike", paper="shown by pictures")
def looks_alike(data: Any) -> Verdict:
    """Samples by selective and by sequential decoding look alike.

    Yes if they differ by at most 2 grey levels of 255 on average.
    """
    grey = next(row["grey_levels"] for row in data["rows"] if row["method"] == "selective")
    return grey <= 2, {"grey levels of 255": grey}


def maf_row(data: Any, start: str) -> Any:
    """The first row whose method starts with these words."""
    return next(row for row in data["rows"] if row["method"].startswith(start))


@claim(
    "maf-ising",
    "maf-ising-faster",
    text="The MAF of the Ising model is sampled many times faster by sweeps.",
    paper="15.7x",
    models=("ising-maf",),  # needs one full pass per site
)
@claim("maf-mnist", "maf-mnist", paper="18.4x")
def maf_faster(data: Any) -> Verdict:
    """A MAF is sampled many times faster if all blocks are swept.

    Yes if it is at least 10 times faster than full passes, one per position.
    """
    row = maf_row(data, "sweeps")
    return row["speedup"] >= 10, {"speed-up": row["speedup"], "largest deviation": row["largest"]}


@claim("maf-mnist", "maf-mnist-alike", paper="shown by pictures")
def digits_alike(data: Any) -> Verdict:
    """Digits of the MAF look alike by both decoders.

    Yes if 99% of pixels are the same at tau 0.5 from zeros.
    """
    row = maf_row(data, "sweeps, tau")
    numbers = {"pixels alike": row["pixels_alike"], "largest deviation": row["largest"]}
    return row["pixels_alike"] >= 0.99, numbers


@claim(
    "maf-ising",
    "maf-ising-cache",
    text="Sweeps of the Ising flow beat sequential decoding with our cache.",
    paper="says that a cache does not apply to such networks",
    ours=True,
)
@claim("maf-mnist", "maf-mnist-cache", paper="says that a cache does not apply to such networks", ours=True)
def maf_beats_cache(data: Any) -> Verdict:
    """Sweeps of the MAF beat sequential decoding with our cache of hidden units.

    Yes if their speed-up is larger.
    """
    sweeps, cached = maf_row(data, "sweeps")["speedup"], maf_row(data, "sequential, cached")["speedup"]
    return sweeps > cached, {"sweeps, over full passes": sweeps, "sequential, cached": cached}


@claim("maf-ising", "maf-ising", paper="energies 0.0005 and -0.0003, which are not those of the Ising model")
def ising_same(data: Any) -> Verdict:
    """The physics of samples is the same by both decoders.

    Yes if energies of the same noise, at tau 0.5 from zeros, agree within one standard error.
    """
    exact, ours = (maf_row(data, name)["observed"] for name in ("sequential, cached", "sweeps, tau"))
    energy, error = exact["energy_per_site"], exact["energy_per_site_error"]
    numbers = {"sequential": energy, "sweeps, tau 0.5": ours["energy_per_site"], "standard error": error}
    same = abs(ours["energy_per_site"] - energy) <= error
    return same, numbers | {"exact": ours["exact_energy_per_site"]}


@claim("generators", "generators", paper="10.20 against 19.32")
def lower_fid_than_ddim(data: Any) -> Verdict:
    """The flow has a lower FID than DDIM with 20 steps.

    Yes if its FID is lower, at the same number of samples.
    """
    return beats(data, "DDIM, 20 steps", "fid")


@claim("generators", "generators-gan", paper="10.20 against 9.67")
def fid_close_to_gan(data: Any) -> Verdict:
    """The flow's FID is close to that of FastGAN.

    Yes if it is below 1.1 times that of FastGAN, at the same number of samples.
    """
    return beats(data, "FastGAN", "fid", 1.1)


@claim("generators", "generators-speed", paper="2.63 s against 3.41 s; DDIM 2.31 s")
def faster_than_gan(data: Any) -> Verdict:
    """The flow samples faster than FastGAN.

    Yes if a batch takes less time.
    """
    return beats(data, "FastGAN", "seconds")


def beats(data: Any, other: str, key: str, factor: float = 1.0) -> Verdict:
    """The flow's FID (with KID beside it) or seconds against a baseline; undecided if that does not count."""
    rows = {row["method"]: row for row in data["rows"]}
    ours, theirs = rows["flow, selective"], rows[other]
    numbers = {f"{key}, flow": ours[key], f"{key}, {other}": theirs[key]}
    if key == "fid":
        numbers |= {"KID, flow": ours["kid"], f"KID, {other}": theirs["kid"]}
    return (ours[key] < factor * theirs[key] if theirs["counts"] else None), numbers


def earliest(data: Any) -> tuple[dict[str, float], list[float]]:
    """The step of the earliest checkpoint, and its sweeps of every block, all swept."""
    moment = data["moments"][0]
    return {"step": moment["step"]}, [block["mean"] for block in moment["sweeps"]["layers"]]


@claim("undertrained", "undertrained", paper="an open question", ours=True)
def early_redundancy(data: Any) -> Verdict:
    """The redundancy exists before training ends: later blocks converge in a few sweeps.

    Yes if they need at most 8 at the earliest kept checkpoint, all blocks swept at tau 0.5 from zeros.
    """
    step, (_, *others) = earliest(data)
    return max(others) <= FEW_SWEEPS, step | {"most of the others": max(others)}


@claim("undertrained", "undertrained-first", paper="an open question", ours=True)
def early_difference(data: Any) -> Verdict:
    """The first block stands out before training ends.

    Yes if at the earliest kept checkpoint it needs at least 2 times the sweeps of any other block.
    """
    step, (first, *others) = earliest(data)
    return first >= MANY_TIMES * max(others), step | {"first block": first, "most of the others": max(others)}
